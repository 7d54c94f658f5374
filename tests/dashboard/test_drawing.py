"""Words and charts, without rows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from controlplane.dashboard import charts, wording
from controlplane.dashboard.badges import CHALLENGE, HEALTH, JOB, SYNC, VERSION, badge
from controlplane.fleet.models import Challenge
from controlplane.fleet.status import Health, Sync
from controlplane.jobs.models import Job
from controlplane.registry.models import Version


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1_133_000, "1.08 MiB"),
        (45_000_000, "42.9 MiB"),
        (2**40, "1.00 TiB"),
        (None, "–"),
    ],
)
def test_sizes_are_binary(count: int | None, words: str) -> None:
    assert wording.size(count) == words


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [
        (1, 3, "33.3 %"),
        (1, 40, "2.50 %"),
        (1, 100_000, "0.0010 %"),
        (0, 5, "0 %"),
        (5, 5, "100 %"),
        (None, 5, "–"),
        (1, 0, "–"),
    ],
)
def test_shares_keep_the_digits_that_matter(part: int | None, whole: int, words: str) -> None:
    assert wording.share(part, whole) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0421, "42 ms"), (1.26, "1.3 s"), (250, "4 min 10 s"), (7300, "2 h 1 min"), (None, "–"), ("", "–")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert wording.duration(seconds) == words


@pytest.mark.parametrize(
    ("table", "states"),
    [
        (HEALTH, Health),
        (SYNC, Sync),
        (VERSION, Version.State.values),
        (JOB, Job.State.values),
        (CHALLENGE, Challenge.State.values),
    ],
)
def test_each_state_has_its_own_icon_and_word(table: dict[str, object], states: object) -> None:
    for state in states:  # type: ignore[attr-defined]
        known = table[str(state)]
        assert known.word  # type: ignore[attr-defined]
        assert known.icon  # type: ignore[attr-defined]


def test_unknown_state_is_shown_as_it_is() -> None:
    assert badge(JOB, "dreaming").word == "Dreaming"


def _points(*sizes: int) -> list[charts.SizePoint]:
    return [charts.SizePoint(number, size, number > 0, "/", "") for number, size in enumerate(sizes)]


def test_log_scale_puts_equal_ratios_at_equal_distances() -> None:
    chart = charts.size_chart(_points(2**26, 2**24, 2**22, 2**20), 2**26)
    assert chart is not None
    ys = [mark.y for mark in chart.marks]
    steps = [round(b - a) for a, b in pairwise(ys)]
    assert steps[0] > 0
    assert max(steps) - min(steps) <= 1
    assert chart.full.at == ys[0]


@pytest.mark.parametrize("sizes", [(1000,), (1000, 0, 0), (2**40, 1), tuple(range(1, 200)), (5, 5, 5)])
def test_marks_stay_inside_the_plot(sizes: tuple[int, ...]) -> None:
    chart = charts.size_chart(_points(*sizes), max(sizes))
    assert chart is not None
    assert all(0 <= mark.x <= 100 and 0 <= mark.y <= chart.floor for mark in chart.marks)
    assert len(chart.columns) <= 6
    assert 1 <= len(chart.rows) <= 8


def test_nothing_to_draw() -> None:
    assert charts.size_chart([], 5) is None
    assert charts.size_chart(_points(1), 0) is None


def test_phases_share_one_scale() -> None:
    half = charts.phases({"fetch": 0.1, "prepare": 0.3, "commit": 0.1}, longest=1.0)
    assert [segment.width for segment in half] == [10.0, 30.0, 10.0]
    assert [segment.x for segment in half] == [0.0, 10.0, 40.0]
    assert sum(segment.width for segment in charts.phases({"fetch": 9}, longest=1.0)) == 100
    assert all(segment.width == 0 for segment in charts.phases({}, longest=0.0))


def test_voyage_shows_how_far_an_island_has_come() -> None:
    assert charts.voyage(7, 9, length=4) == charts.Voyage(length=30, held=8, here=11)
    assert charts.voyage(None, 1) == charts.Voyage(length=14, held=0, here=None)
    assert charts.voyage(2, 30, length=3) == charts.Voyage(length=22, held=0, here=None)
    assert charts.voyage(5, 3, length=2) == charts.Voyage(length=14, held=8, here=11)
    assert charts.voyage(3, None) is None
