"""Rows of the way that an island has before it: the planner's route to the head of its channel, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.fleet import measures
from controlplane.fleet.models import Island
from controlplane.registry import merging, routes
from controlplane.registry.errors import Missing, Refusal


@dataclass(frozen=True, slots=True)
class Leg:
    """One step: `version` is where it leads."""

    what: str
    version: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Journey:
    """The whole way. `link` (bytes per second) was `measured` or is taken for granted; `building` says what would be
    sooner.
    """

    target: int
    legs: tuple[Leg, ...]
    bytes: int
    seconds: float
    link: float
    measured: bool
    building: merging.Building | None


_WORDS = {"step": "step patch", "merged": "merged patch", "reverse": "reverse patch"}


def to_head(island: Island) -> Journey | str | None:
    """The way to the head of the channel that the island follows, a sentence where there is none, None at the head."""
    channel = island.pin or island.channel
    if channel.version is None or island.pending:
        return None
    means = measures.means_of(island)
    number = channel.version.number
    try:
        known = bool(routes.numbers_of(island.run, island.digest))
        ground, route = routes.search(island.run, island.digest if known else "", number, means=means)
    except (Missing, Refusal) as refusal:
        return refusal.detail
    if not route.edges and route.anchor is None:
        return None
    plan = routes.described(island.run, ground, route)
    legs = tuple(
        Leg(
            _WORDS.get(step.get("via", ""), "anchor"),
            step["version"] if step["kind"] == "anchor" else step["to"],
            step["bytes"],
            step["seconds"],
        )
        for step in plan.steps
    )
    return Journey(
        number, legs, plan.bytes, plan.seconds, means.link, island.link_bytes_per_second is not None,
        merging.offer(island.run, ground, route, means, ask=False),
    )  # fmt: skip
