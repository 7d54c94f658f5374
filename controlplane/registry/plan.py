"""The route to a version: the one over step, merged and reverse patches and anchors that is servable soonest for an
island's link, cores and codecs (`registry.cost`). A pure function over what the run has; it reads no database.

What is held and every anchor are where a route may begin; each patch leads on. Only patches that exist are edges: a
chain with a hole is refused, never jumped over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from controlplane.registry.cost import Means

STEP, MERGED, REVERSE = "step", "merged", "reverse"
UNREADABLE = 1e9  # seconds that a patch counts for an island that knows no codec of it: more than any other
GROWTH = 0.7  # a merged patch over L versions has about L ** 0.7 times the bytes of one step (docs/adr/routes.md)


class Edge(NamedTuple):
    """A patch: `key` is its row, `origin` and `to` are numbers of versions."""

    key: int
    origin: int
    to: int
    kind: str
    bytes: int
    changed: int | None
    codecs: str


TO = itemgetter(Edge._fields.index("to"))  # runs of ten thousand versions are sorted by it


@dataclass(frozen=True, slots=True)
class Route:
    """`start` is the held version that it begins from; None when it begins at the anchor of version `anchor`.

    `seconds` are those of each step, the anchor first; `proof` what the strong digests of the result take.
    """

    start: int | None
    anchor: int | None
    edges: tuple[Edge, ...]
    seconds: tuple[float, ...]
    proof: float
    bytes: int

    @property
    def total(self) -> float:
        """Seconds from the first byte to a proven version."""
        return sum(self.seconds) + self.proof


class NoRoute(Exception):  # noqa: N818  an answer, not a fault
    """Nothing leads to the target; the text says where the hole is."""


def plan(
    edges: Iterable[Edge],
    anchors: Mapping[int, int],
    held: Collection[int],
    target: int,
    *,
    full_bytes: int,
    means: Means,
) -> Route:
    """The soonest route to version `target` from one of the versions `held` (they have the same state; none: nothing
    is held) or from an anchor ({version: bytes}). Raises NoRoute.
    """
    if target in held:
        return Route(target, None, (), (), 0.0, 0)
    edges = list(edges)
    known = {codecs: means.knows(codecs) for codecs in {edge.codecs for edge in edges}}
    usable = [edge for edge in edges if known[edge.codecs]]
    search = _Search(usable, anchors, held, full_bytes, means)
    found = search.to(target)
    if found is None:
        raise NoRoute(_hole(edges, usable, target))
    if not found.proof:
        return found
    # The proof is paid once per route, so it can't be laid on edges: a route of the publisher's own patches alone may
    # be sooner without it.
    signed = _Search([edge for edge in usable if edge.kind == STEP], anchors, held, full_bytes, means).to(target)
    return found if signed is None or found.total <= signed.total else signed


class _Search:
    """Shortest paths from all beginnings at once."""

    def __init__(
        self, edges: list[Edge], anchors: Mapping[int, int], held: Collection[int], full_bytes: int, means: Means
    ) -> None:
        self._full = full_bytes
        self._means = means
        seen = {edge.codecs for edge in edges}
        self._decoding = {codecs: (means.scan(codecs, full_bytes), means.element(codecs)) for codecs in seen}
        self._anchors, self._held = anchors, held
        self._best: dict[int, float] = {
            number: means.anchor(size, full_bytes) for number, size in anchors.items()
        } | dict.fromkeys(held, 0.0)
        self._came: dict[int, Edge] = {}
        self._settle(edges)

    def _settle(self, edges: list[Edge]) -> None:
        """Patches lead to higher numbers, except the reverse ones: so one pass in the order of the numbers settles
        nearly everything, and a pass that changes nothing is the last.
        """
        ahead = sorted((edge for edge in edges if edge.to > edge.origin), key=TO)
        back = sorted((edge for edge in edges if edge.to < edge.origin), key=TO, reverse=True)
        self._relax(ahead)
        while back and self._relax(back):
            if not self._relax(ahead):
                return

    def _relax(self, edges: list[Edge]) -> bool:
        best, came, decoding, per_byte = self._best, self._came, self._decoding, 1 / self._means.link
        better, unknown = False, float("inf")
        for edge in edges:
            _, origin, to, _, size, changed, codecs = edge
            before = best.get(origin)
            if before is None:
                continue
            scan, element = decoding[codecs]
            seconds = before + size * per_byte + (changed or 0) * element + scan
            if seconds < best.get(to, unknown):
                best[to], came[to] = seconds, edge
                better = True
        return better

    def _seconds(self, edge: Edge) -> float:
        scan, element = self._decoding[edge.codecs]
        return edge.bytes / self._means.link + (edge.changed or 0) * element + scan

    def to(self, target: int) -> Route | None:
        if target not in self._best:
            return None
        path: list[Edge] = []
        at = target
        while at in self._came:
            path.append(self._came[at])
            at = path[-1].origin
        path.reverse()
        means = self._means
        seconds = [self._seconds(edge) for edge in path]
        size = sum(edge.bytes for edge in path)
        proof = means.strong(self._full) if any(edge.kind != STEP for edge in path) else 0.0
        if at in self._held:
            return Route(at, None, tuple(path), tuple(seconds), proof, size)
        begins = means.anchor(self._anchors[at], self._full)
        return Route(None, at, tuple(path), (begins, *seconds), proof, size + self._anchors[at])


def soonest(patches: Sequence[Edge], fleet: Iterable[Means], full_bytes: int) -> Edge:
    """Of patches between the same two versions, the one by which the islands of a fleet are there soonest, in sum."""

    def seconds(edge: Edge) -> float:
        return sum(
            plan([edge], {}, {edge.origin}, edge.to, full_bytes=full_bytes, means=means).total
            if means.knows(edge.codecs)
            else UNREADABLE
            for means in fleet
        )

    fleet = list(fleet)
    return min(patches, key=seconds)


def _hole(edges: Sequence[Edge], usable: Sequence[Edge], target: int) -> str:
    """Where the chain to the target ends, in one sentence."""
    into: dict[int, list[int]] = defaultdict(list)
    for edge in usable:
        into[edge.to].append(edge.origin)
    seen, queue = {target}, [target]
    while queue:
        fresh = [number for number in into[queue.pop()] if number not in seen]
        seen.update(fresh)
        queue += fresh
    first = min(seen)
    if any(edge.to == first for edge in edges):
        return f"Every patch to version {first} has a codec that you do not know, and no anchor lies behind it."
    return f"Version {first} has no patch from what you hold, and no anchor lies between it and version {target}."


def estimate(edges: Iterable[Edge], origin: int, to: int) -> tuple[int, int, int] | None:
    """What one patch from `origin` to `to` would have: bytes and changed elements, and how many steps lie between the
    two. None where the steps that join them are not all there. Works in both directions, and over a fork.
    """
    into = {edge.to: edge for edge in edges if edge.kind == STEP}
    near, far = _line(into, origin), _line(into, to)
    shared = set(far)
    common = next((number for number in near if number in shared), None)
    if common is None:
        return None
    steps = [into[number] for line in (near, far) for number in line[: line.index(common)]]
    if not steps:
        return None
    share = len(steps) ** (GROWTH - 1)
    return (
        int(sum(edge.bytes for edge in steps) * share),
        int(sum(edge.changed or 0 for edge in steps) * share),
        len(steps),
    )


def _line(into: Mapping[int, Edge], number: int) -> list[int]:
    """A version and what it was made from, step by step."""
    line = [number]
    while (edge := into.get(line[-1])) is not None:
        line.append(edge.origin)
    return line
