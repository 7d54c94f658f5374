"""Routes to versions: reads what the planner needs, asks it, and names the files. The number of queries never grows
with the number of versions, and the rows that are read are those between what is held and the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q
from django.db.models.functions import Mod

from controlplane.registry import announcing
from controlplane.registry import plan as planning
from controlplane.registry.cost import Means
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Anchor, Patch, PatchPart, Run, Version
from controlplane.registry.plan import Edge, Route

READY, RETIRED = Version.State.READY, Version.State.RETIRED
NEAR, LONG = 128, 16  # of a way over many versions, all patches this near to its ends are looked at, else long ones


@dataclass(frozen=True, slots=True)
class Scope:
    """What a route may use."""

    patches: tuple[str, ...] = (Patch.Kind.STEP, Patch.Kind.MERGED, Patch.Kind.REVERSE)
    anchors: tuple[str, ...] = (Anchor.Kind.UPLOAD, Anchor.Kind.BUILT)  # their files are blobs of the run


SERVED = Scope()
ELSEWHERE = Scope(anchors=(*SERVED.anchors, Anchor.Kind.REFERENCE))
PUBLISHED = Scope(patches=(Patch.Kind.STEP,))  # what workers walk: patches that the publisher made


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


def find(run: Run, held: str, to: int | None, *, means: Means | None = None, scope: Scope = SERVED) -> Plan:
    """The soonest route from the state digest `held` (empty: nothing) to version `to` (None: the newest ready one).

    Raises Missing, Refusal `unknown_base` and `no_route`.
    """
    ground, route = search(run, held, to, means=means or Means.of(), scope=scope)
    return described(run, ground, route)


def search(run: Run, held: str, to: int | None, *, means: Means, scope: Scope = SERVED) -> tuple[Ground, Route]:
    """The same without the files, with what it was chosen from."""
    target = _target(run, to)
    numbers = numbers_of(run, held)
    if held and not numbers:
        raise Refusal(
            "No version of this run has the digest that you hold; ask without it to start from an anchor.",
            code="unknown_base",
        )
    ground = survey(run, target, numbers, scope)
    try:
        try:
            return ground, ground.soonest(means)
        except planning.NoRoute:
            # After a rewind the chain passes by the nearest anchor: look at all there is before saying no.
            ground = survey(run, target, numbers, scope, whole=True)
            return ground, ground.soonest(means)
    except planning.NoRoute as error:
        raise Refusal(str(error), code="no_route") from error


def numbers_of(run: Run, digest: str) -> tuple[int, ...]:
    """The versions of a state, retired ones too: a patch may still lead on from them."""
    if not digest:
        return ()
    found = announcing.servable(run) | Version.objects.filter(run=run, state=RETIRED)
    return tuple(found.filter(state_digest=digest).order_by("-number").values_list("number", flat=True))


def survey(run: Run, target: Version, held: tuple[int, ...], scope: Scope = SERVED, *, whole: bool = False) -> Ground:
    """The patches and anchors that may lie on the way, with `whole` all of the run."""
    allowed = announcing.states(run)
    anchors = dict(
        Anchor.objects.filter(version__run=run, version__state__in=allowed, kind__in=scope.anchors).values_list(
            "version__number", "bytes"
        )
    )
    near = None if whole else _near(*_ends(anchors, held, target.number))
    # Versions with patches have a manifest, so their states say all. What is held may be retired.
    versions = Version.objects.alias(rest=Mod("number", LONG)).filter(near or Q(), run=run).order_by()
    versions = versions.filter(Q(state__in=allowed) | Q(number__in=held))
    numbers = dict(versions.values_list("pk", "number"))
    patches = Patch.objects.filter(kind__in=scope.patches)
    if near is None:
        patches = patches.filter(run=run)
    else:  # one parameter, where IN would have a thousand
        patches = patches.extra(where=["registry_patch.to_version_id = ANY(%s)"], params=[list(numbers)])
    rows = patches.values_list("pk", "from_version", "to_version", "kind", "bytes", "changed", "codecs")
    edges = [
        Edge(key, numbers[origin], numbers[to], kind, size, changed, codecs)
        for key, origin, to, kind, size, changed, codecs in rows
        if origin in numbers and to in numbers
    ]
    return Ground(target, held, edges, anchors)


def _ends(anchors: Collection[int], held: Sequence[int], target: int) -> tuple[int, int]:
    """The lowest and the highest version that a route may pass by."""
    begin = min(held, key=lambda number: (abs(target - number), -number), default=None)
    if begin is not None and begin <= target:
        return begin, target
    nearest = max((number for number in anchors if number <= target), default=0)
    return nearest, max(target, begin or 0)


def _near(low: int, high: int) -> Q:
    """The versions on a way between two. Far from both, only those where long merged patches begin and end: one of
    these is kept only where it is smaller than what it replaces.
    """
    if high - low <= 2 * NEAR:
        return Q(number__range=(low, high))
    far = Q(number__range=(low, high), rest=0)
    return Q(number__range=(low, low + NEAR)) | Q(number__range=(high - NEAR, high)) | far


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
                **({"uri": row.uri} if row.uri else {}),
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
    if not announcing.servable(run).filter(pk=target.pk).exists():
        raise Refusal(f"Version {to} is {target.state}; routes lead to ready versions.", code="no_route")
    return target
