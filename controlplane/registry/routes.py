"""Routes to versions: reads what the planner needs, asks it, and names the files. The number of queries never grows
with the number of versions, and the rows that are read are those between what is held and the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection

from controlplane.registry import announcing, keys
from controlplane.registry import plan as planning
from controlplane.registry.cost import Means
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Anchor, Patch, PatchPart, Run, Version
from controlplane.registry.plan import Edge, Route

READY, RETIRED = Version.State.READY, Version.State.RETIRED
NEAR, LONG = 128, 16  # of a way over many versions, all patches this near to its ends are looked at, else long ones
ALL = 1 << 62
# Versions with patches have a manifest, so their states say all; what is held may be retired. Far from both ends of the
# way, only those count where long merged patches begin and end: one of these is kept only where it is smaller than what
# it replaces. Where there are none, all count. Written out so that the versions are gone through once, whichever end of
# a patch they are.
_EDGES = """
    WITH near AS MATERIALIZED (
        SELECT id, number FROM registry_version
        WHERE run_id = %(run)s AND (state = ANY(%(states)s) OR number = ANY(%(held)s::bigint[]))
            AND number BETWEEN %(low)s AND %(high)s
            AND (
                number <= %(low)s + %(near)s OR number >= %(high)s - %(near)s OR number %% %(long)s = 0
                OR NOT EXISTS (
                    SELECT FROM registry_patch WHERE run_id = %(run)s AND kind = ANY(%(kinds)s) AND kind <> 'step'
                )
            )
    )
    SELECT patch.id, origin.number, target.number, patch.kind, patch.bytes, patch.changed, patch.codecs
    FROM registry_patch patch
    JOIN near origin ON origin.id = patch.from_version_id
    JOIN near target ON target.id = patch.to_version_id
    WHERE patch.run_id = %(run)s AND patch.kind = ANY(%(kinds)s)
"""


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
    target, trusted = _target(run, to)
    numbers = numbers_of(run, held)
    if held and not numbers:
        raise Refusal(
            "No version of this run has the digest that you hold; ask without it to start from an anchor.",
            code="unknown_base",
        )
    # After a rewind the chain passes by the nearest anchor: look at all there is before saying no.
    hole = ""
    for whole, signed in ((False, trusted), (True, trusted), *([(True, False)] if trusted else [])):
        ground = survey(run, target, numbers, scope, whole=whole, signed=signed)
        try:
            return ground, ground.soonest(means)
        except planning.NoRoute as error:
            hole = str(error)
    raise Refusal(hole, code="no_route")


def numbers_of(run: Run, digest: str) -> tuple[int, ...]:
    """The versions of a state, retired ones too: a patch may still lead on from them."""
    if not digest:
        return ()
    found = announcing.servable(run) | Version.objects.filter(run=run, state=RETIRED)
    return tuple(found.filter(state_digest=digest).order_by("-number").values_list("number", flat=True))


def survey(run: Run, target: Version, held: tuple[int, ...], scope: Scope, *, whole: bool, signed: bool) -> Ground:
    """The patches and anchors that may lie on the way, with `whole` all of the run. With `signed` no way begins at
    an anchor that no key of the run has signed, where there is another.
    """
    allowed = announcing.states(run)
    found = Anchor.objects.filter(version__run=run, version__state__in=allowed, kind__in=scope.anchors)
    rows = list(found.annotate(signed=keys.SIGNED).values_list("version__number", "bytes", "signed"))
    if signed and any(row[2] for row in rows):
        rows = [row for row in rows if row[2]]
    anchors = {number: size for number, size, _ in rows}
    low, high = (0, ALL) if whole else _ends(anchors, held, target.number)
    facts: dict[str, Any] = {
        "run": run.pk, "states": list(allowed), "held": list(held), "kinds": list(scope.patches), "low": low,
        "high": high, "near": ALL if whole else NEAR, "long": LONG,
    }  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(_EDGES, facts)
        edges = list(map(Edge._make, cursor.fetchall()))
    return Ground(target, held, edges, anchors)


def _ends(anchors: Collection[int], held: Sequence[int], target: int) -> tuple[int, int]:
    """The lowest and the highest version that a route may pass by."""
    begin = min(held, key=lambda number: (abs(target - number), -number), default=None)
    if begin is not None and begin <= target:
        return begin, target
    nearest = max((number for number in anchors if number <= target), default=0)
    return nearest, max(target, begin or 0)


def described(run: Run, ground: Ground, route: Route) -> Plan:
    """A route with manifests, files and parts, in three queries."""
    numbers = {edge.to for edge in route.edges} | ({route.anchor} if route.anchor is not None else set())
    # ANY takes one parameter, where IN would have one for each step.
    versions = Version.objects.filter(run=run).extra(where=["number = ANY(%s)"], params=[list(numbers)])
    manifests = dict(versions.order_by().values_list("number", "manifest_sha256"))
    parts: dict[int, list[dict[str, Any]]] = {edge.key: [] for edge in route.edges}
    named = PatchPart.objects.extra(where=["patch_id = ANY(%s)"], params=[list(parts)]).order_by("patch_id", "index")
    for key, sha256, size in named.values_list("patch_id", "blob__sha256", "blob__size"):
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


def _target(run: Run, to: int | None) -> tuple[Version, bool]:
    """The version, and whether a key of the run has signed it: islands that go there refuse anchors that none has."""
    chosen = Version.objects.defer("envelope", "side_files").annotate(signed=keys.SIGNED)
    if to is None:
        target = chosen.filter(run=run, state=READY).order_by("-number").first()
        if target is None:
            raise Missing("The run has no ready version yet.")
        return target, target.signed
    target = chosen.filter(run=run, number=to).first()
    if target is None:
        raise Missing("There is no such version in this run.")
    if not announcing.servable(run).filter(pk=target.pk).exists():
        raise Refusal(f"Version {to} is {target.state}; routes lead to ready versions.", code="no_route")
    return target, target.signed
