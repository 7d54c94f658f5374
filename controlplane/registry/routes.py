"""Routes to versions: reads what the planner needs, asks it, and names the files. The number of queries never grows
with the number of versions, and the rows that are read are those between what is held and the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.registry import plan as planning
from controlplane.registry.announcing import servable
from controlplane.registry.cost import Means
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Anchor, Patch, PatchPart, Run, Version
from controlplane.registry.plan import Edge, Route

READY, RETIRED = Version.State.READY, Version.State.RETIRED
PUBLISHED = (Patch.Kind.STEP,)  # what workers walk: patches that the publisher made
ALL = (Patch.Kind.STEP, Patch.Kind.MERGED, Patch.Kind.REVERSE)
SERVED_ANCHORS = (Anchor.Kind.UPLOAD, Anchor.Kind.BUILT)  # their files are blobs of the run


@dataclass(frozen=True, slots=True)
class Plan:
    """A route with its files. `start` is the held version that it begins from, None when it begins from an anchor."""

    start: int | None
    target: int
    steps: tuple[dict[str, Any], ...]
    bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """As the API answers it."""
        return {
            "from": self.start,
            "to": self.target,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "steps": list(self.steps),
        }


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run has between two of its versions: the planner's input, and what else is worth knowing about it."""

    target: Version
    held: tuple[int, ...]
    edges: list[Edge]
    anchors: Mapping[int, int]

    def soonest(self, means: Means) -> Route:
        """The planner's answer. Raises NoRoute."""
        full = self.target.full_bytes or 0
        return planning.plan(self.edges, self.anchors, self.held, self.target.number, full_bytes=full, means=means)


def find(run: Run, held: str, to: int | None, *, means: Means | None = None, kinds: Collection[str] = ALL) -> Plan:
    """The soonest route from the state digest `held` (empty: nothing) to version `to` (None: the newest ready one).

    Raises Missing, Refusal `unknown_base` and `no_route`.
    """
    ground, route = search(run, held, to, means=means or Means.of(), kinds=kinds)
    return described(run, ground, route)


def search(run: Run, held: str, to: int | None, *, means: Means, kinds: Collection[str] = ALL) -> tuple[Ground, Route]:
    """The same without the files, with what it was chosen from."""
    target = _target(run, to)
    numbers = tuple(numbers_of(run, held))
    if held and not numbers:
        raise Refusal(
            "No version of this run has the digest that you hold; ask without it to start from an anchor.",
            code="unknown_base",
        )
    ground = survey(run, target, numbers, kinds)
    try:
        try:
            return ground, ground.soonest(means)
        except planning.NoRoute:
            # After a rewind the chain passes by the nearest anchor: look at all there is before saying no.
            ground = survey(run, target, numbers, kinds, whole=True)
            return ground, ground.soonest(means)
    except planning.NoRoute as error:
        raise Refusal(str(error), code="no_route") from error


def numbers_of(run: Run, digest: str) -> list[int]:
    """The versions of a state, retired ones too: a patch may still lead on from them."""
    if not digest:
        return []
    found = servable(run) | Version.objects.filter(run=run, state=RETIRED)
    return list(found.filter(state_digest=digest).order_by("-number").values_list("number", flat=True))


def survey(
    run: Run, target: Version, held: Sequence[int], kinds: Collection[str] = ALL, *, whole: bool = False
) -> Ground:
    """The patches and anchors from the nearest anchor, or the held version when that is older, up to the target (or
    the held version, when that is newer). With `whole`, all of the run.
    """
    allowed = servable(run).order_by()
    anchors = dict(
        Anchor.objects.filter(version__in=allowed, kind__in=SERVED_ANCHORS).values_list("version__number", "bytes")
    )
    edges = Patch.objects.filter(run=run, kind__in=kinds, to_version__in=allowed)
    if not whole:
        low, high = _window(anchors, held, target.number)
        edges = edges.filter(from_version__number__range=(low, high), to_version__number__range=(low, high))
    rows = edges.values_list("pk", "from_version__number", "to_version__number", "kind", "bytes", "changed", "codecs")
    return Ground(target, tuple(held), [Edge._make(row) for row in rows], anchors)


def _window(anchors: Collection[int], held: Sequence[int], target: int) -> tuple[int, int]:
    nearest = max((number for number in anchors if number <= target), default=0)
    if not held:
        return nearest, target
    begin = min(held, key=lambda number: (abs(target - number), -number))
    return min(nearest, begin, target), max(begin, target)


def described(run: Run, ground: Ground, route: Route) -> Plan:
    """A route with manifests, files and parts, in three queries."""
    numbers = {edge.to for edge in route.edges} | ({route.anchor} if route.anchor is not None else set())
    manifests = dict(Version.objects.filter(run=run, number__in=numbers).values_list("number", "manifest_sha256"))
    parts: dict[int, list[dict[str, Any]]] = {edge.key: [] for edge in route.edges}
    for key, sha256, size in (
        PatchPart.objects.filter(patch__in=list(parts))
        .order_by("patch", "index")
        .values_list("patch", "blob__sha256", "blob__size")
    ):
        parts[key].append({"sha256": sha256, "size": size})
    seconds = iter(route.seconds)
    steps: list[dict[str, Any]] = []
    if route.anchor is not None:
        row = Anchor.objects.get(version__run=run, version__number=route.anchor)
        steps.append(
            {
                "kind": "anchor",
                "version": route.anchor,
                "manifest": manifests[route.anchor],
                "bytes": row.bytes,
                "seconds": round(next(seconds), 3),
                "files": row.files,
            }
        )
    for edge in route.edges:
        steps.append(
            {
                "kind": "patch",
                "via": edge.kind,
                "from": edge.origin,
                "to": edge.to,
                "manifest": manifests[edge.to],
                "bytes": edge.bytes,
                "seconds": round(next(seconds), 3),
                "parts": parts[edge.key],
            }
        )
    return Plan(route.start, ground.target.number, tuple(steps), route.bytes, route.total)


def _target(run: Run, to: int | None) -> Version:
    chosen = Version.objects.defer("envelope", "side_files")
    if to is None:
        target = chosen.filter(run=run, state=READY).order_by("-number").first()
        if target is None:
            raise Missing("The run has no ready version yet.")
        return target
    target = chosen.filter(run=run, number=to).first()
    if target is None:
        raise Missing("There is no such version in this run.")
    if not servable(run).filter(pk=target.pk).exists():
        raise Refusal(f"Version {to} is {target.state}; routes lead to ready versions.", code="no_route")
    return target
