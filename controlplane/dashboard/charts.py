"""Charts as plain numbers for SVG templates. Horizontal places are per cent of the plot, so that a chart stretches
with its page while its letters keep their size; vertical places are pixels. Nothing here may know a row or a style.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard import wording

PLOT_HEIGHT = 240
_TOP, _BOTTOM = 18, 212
_MAX_LABELS = 6


@dataclass(frozen=True, slots=True)
class SizePoint:
    """One version on the size chart. `bytes` is the patch, or the checkpoint itself for an anchor without a patch."""

    number: int
    bytes: int
    is_patch: bool
    address: str
    note: str
    density: float | None = None  # changed elements of all
    unit_share: float | None = None  # steps of one of all changed elements


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the plot: x in per cent, y in pixels."""

    x: float
    y: float
    point: SizePoint
    label: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of an axis with its words."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class SizeChart:
    """Everything that the template draws."""

    marks: tuple[Mark, ...]
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    full: Tick
    budget: Tick | None
    over_budget: int
    height: int
    floor: int
    hit_width: float
    summary: str


def size_chart(points: Sequence[SizePoint], full_bytes: int, budget: int = 0) -> SizeChart | None:
    """Lay out patch bytes per version on a logarithmic scale, with the full size as the line to beat and, where one is
    given, a budget that patches should stay under.
    """
    if not points or full_bytes <= 0:
        return None
    sizes = [max(1, point.bytes) for point in points] + [full_bytes] + ([budget] if budget else [])
    low = math.floor(math.log2(min(sizes)) - 0.5)
    high = max(math.log2(max(sizes)) + 0.35, low + 4)

    def height_of(count: float) -> float:
        return round(_BOTTOM - (math.log2(max(1.0, count)) - low) / (high - low) * (_BOTTOM - _TOP), 1)

    step = 100 / len(points)
    marks = tuple(
        Mark(round((index + 0.5) * step, 3), height_of(point.bytes), point, wording.size(point.bytes))
        for index, point in enumerate(points)
    )
    every = max(1, math.ceil(len(points) / _MAX_LABELS))
    columns = tuple(Tick(mark.x, f"v{mark.point.number}") for mark in marks[::-1][::every])
    return SizeChart(
        marks=marks,
        rows=_rows(low, high, height_of, height_of(full_bytes)),
        columns=columns,
        full=Tick(height_of(full_bytes), f"full checkpoint {wording.size(full_bytes)}"),
        budget=Tick(height_of(budget), f"budget {wording.size(budget)}") if budget else None,
        over_budget=sum(point.is_patch and point.bytes > budget for point in points) if budget else 0,
        height=PLOT_HEIGHT,
        floor=_BOTTOM,
        hit_width=round(min(step, 12), 3),
        summary=_summary([point.bytes for point in points if point.is_patch], full_bytes),
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: place and width in per cent, top and height in pixels."""

    x: float
    width: float
    y: float
    height: float
    note: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars over a floor, with lines for a few round values."""

    bars: tuple[Bar, ...]
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    height: int
    floor: int
    summary: str


SMALL_HEIGHT = 130
_SMALL_TOP, _SMALL_BOTTOM = 12, 104


def density_chart(points: Sequence[SizePoint]) -> BarChart | None:
    """The share of elements that each version changed."""
    known = [(point.number, point.density) for point in points if point.density is not None]
    return _share_chart(known, "of elements", "Share of elements that changed")


def steps_chart(points: Sequence[SizePoint]) -> BarChart | None:
    """The share of changes that go to the next value above or below."""
    known = [(point.number, point.unit_share) for point in points if point.unit_share is not None]
    return _share_chart(known, "of changes", "Share of changes that are steps of one")


def _share_chart(known: Sequence[tuple[int, float]], of: str, what: str) -> BarChart | None:
    if not known:
        return None
    values = [share for _, share in known]
    notes = [f"Version {number}: {wording.share(share, 1)} {of}" for number, share in known]
    labels = [f"v{number}" for number, _ in known]
    middle = wording.share(statistics.median(values), 1)
    summary = f"{what}, in {wording.plural(len(known), 'version')}; the median is {middle}."
    return _bars(values, notes, labels, lambda value: wording.share(value, 1), summary)


def rate_chart(hours: Sequence[tuple[datetime, int]]) -> BarChart | None:
    """Versions published per hour."""
    counts = [float(count) for _, count in hours]
    if not any(counts):
        return None
    notes = [f"{hour:%H}:00 UTC: {wording.plural(count, 'version')}" for hour, count in hours]
    total = wording.plural(sum(count for _, count in hours), "version")
    summary = f"{total} in the last {len(hours)} hours, at most {int(max(counts))} in one."
    return _bars(counts, notes, [f"{hour:%H}:00" for hour, _ in hours], lambda value: f"{value:g}", summary)


def _bars(
    values: Sequence[float],
    notes: Sequence[str],
    labels: Sequence[str],
    words: Callable[[float], str],
    summary: str,
) -> BarChart:
    most = max(values) or 1.0
    step = 100 / len(values)
    span = _SMALL_BOTTOM - _SMALL_TOP
    bars = tuple(
        Bar(
            x=round(index * step + step * 0.1, 3),
            width=round(step * 0.8, 3),
            y=round(_SMALL_BOTTOM - span * value / most, 1),
            height=round(span * value / most, 1),
            note=note,
        )
        for index, (value, note) in enumerate(zip(values, notes, strict=True))
    )
    every = max(1, math.ceil(len(labels) / _MAX_LABELS))
    columns = tuple(Tick(round((index + 0.5) * step, 3), labels[index]) for index in range(len(labels) - 1, -1, -every))
    rows = tuple(Tick(round(_SMALL_BOTTOM - span * part, 1), words(most * part)) for part in (0.5, 1.0))
    return BarChart(bars, rows, columns, SMALL_HEIGHT, _SMALL_BOTTOM, summary)


def _summary(patches: Sequence[int], full_bytes: int) -> str:
    """The chart for those who do not see it."""
    full = wording.size(full_bytes)
    words = f"Patch bytes of {wording.plural(len(patches), 'version')} on a logarithmic scale; the full size is {full}."
    if patches:
        middle = statistics.median(patches)
        words += f" The median patch has {wording.size(middle)}, {wording.share(middle, full_bytes)} of it."
    return words


def _rows(low: int, high: float, height_of: Callable[[float], float], full_at: float) -> tuple[Tick, ...]:
    """Lines at powers of two: as few as keep 34 pixels between them, none under the words of the full size."""
    exponents = range(low, math.floor(high) + 1)
    per_step = abs(height_of(2.0**low) - height_of(2.0 ** (low + 1)))
    every = next((n for n in (1, 2, 3, 5, 10, 20) if n * per_step >= 34), 20)
    picked = [e for e in exponents if e % every == 0]
    return tuple(Tick(height_of(2.0**e), wording.size(2**e)) for e in picked if abs(height_of(2.0**e) - full_at) > 10)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a stacked bar: x and width in per cent."""

    kind: str
    x: float
    width: float


def phases(seconds: dict[str, float], longest: float) -> tuple[Segment, ...]:
    """Stack fetch, prepare and commit of one sync, on the scale of the longest one."""
    segments: list[Segment] = []
    x = 0.0
    for kind in ("fetch", "prepare", "commit"):
        width = 100 * max(0.0, float(seconds.get(kind) or 0)) / longest if longest > 0 else 0.0
        segments.append(Segment(kind, round(x, 2), round(min(width, 100 - x), 2)))
        x = min(100.0, x + width)
    return tuple(segments)


STRIP = 10  # versions


@dataclass(frozen=True, slots=True)
class Voyage:
    """A channel's recent way, one dash of 6 pixels and a gap of 2 per version: its length, the part that the island
    has behind it, and where it stands.
    """

    length: int
    held: int
    here: int | None


def voyage(held: int | None, head: int | None, length: int = STRIP) -> Voyage | None:
    """The channel's last versions, oldest first: filled as far as the island has come, taller where it stands."""
    if head is None:
        return None
    first = max(0, head - length + 1)
    dashes = head - first + 1
    if held is None or held < first:
        return Voyage(dashes * 8 - 2, 0, None)
    at = min(held, head) - first
    return Voyage(dashes * 8 - 2, at * 8, at * 8 + 3)
