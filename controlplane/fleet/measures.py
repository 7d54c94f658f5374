"""What islands' links and processors were measured to do, from the syncs that they report: their plans are made for it.

An old measurement and a new one count alike, so that one odd sync does not turn the plans around.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from controlplane.fleet.models import Island
from controlplane.registry import cost
from controlplane.registry.cost import Means
from controlplane.registry.models import Patch, Version
from controlplane.registry.plan import Edge

LEAST_BYTES = 256 << 10  # of a download: with less, round trips are what was measured
LEAST_SECONDS = 0.001


def measured(
    island: Island, target: Version, size: int, seconds: Mapping[str, float], route: Sequence[Any]
) -> dict[str, Any]:
    """The changes of the island's row that an accepted report brings."""
    changes: dict[str, Any] = {}
    fetch, prepare = seconds.get("fetch", 0.0), seconds.get("prepare", 0.0)
    if size >= LEAST_BYTES and fetch > LEAST_SECONDS:
        changes["link_bytes_per_second"] = _smooth(island.link_bytes_per_second, size / fetch)
    if prepare > LEAST_SECONDS and target.full_bytes and (patches := _patches(target, route)):
        speed = cost.apply_speed(
            patches, target.full_bytes, prepare, strong=any(patch.kind != Patch.Kind.STEP for patch in patches)
        )
        in_context = {cost.is_contextual(patch.codecs) for patch in patches}
        if in_context == {True}:
            changes["apply_bytes_per_second"] = _smooth(island.apply_bytes_per_second, speed)
        elif in_context == {False}:
            changes["quick_bytes_per_second"] = _smooth(island.quick_bytes_per_second, speed)
    return changes


def means_of(island: Island, *, codecs: Sequence[str] | None = None) -> Means:
    """What the island travels with, as far as it is known."""
    return Means.of(
        link=island.link_bytes_per_second, cores=island.cores, codecs=codecs,
        apply=island.apply_bytes_per_second, quick=island.quick_bytes_per_second,
    )  # fmt: skip


def told(island: Island, cores: int | None, codecs: Sequence[str] | None) -> None:
    """What it says of itself as it asks for a plan: it may run another release, or elsewhere, than when it enrolled."""
    changes: dict[str, Any] = {}
    if cores is not None and cores != island.cores:
        changes["cores"] = cores
    if codecs is not None and list(codecs) != island.codecs:
        changes["codecs"] = list(codecs)
    if changes:
        Island.objects.filter(pk=island.pk).update(**changes)


def _patches(target: Version, route: Sequence[Any]) -> list[Edge]:
    """The patches of a route; empty where it has other legs, or one that is not there any more."""
    legs = [re.fullmatch(r"patch (\d{1,18})-(\d{1,18})", str(leg)) for leg in route]
    ends = [(int(leg[1]), int(leg[2])) for leg in legs if leg]
    if not ends or len(ends) != len(legs):
        return []
    numbers = {number for pair in ends for number in pair}
    between = Patch.objects.filter(
        run=target.run_id, from_version__number__in=numbers, to_version__number__in=numbers
    ).values_list("pk", "from_version__number", "to_version__number", "kind", "bytes", "changed", "codecs")
    found = {(edge.origin, edge.to): edge for edge in map(Edge._make, between)}
    return [found[pair] for pair in ends] if found.keys() >= set(ends) else []


def _smooth(before: int | None, now: float) -> int:
    return max(1, round(now if before is None else (before + now) / 2))
