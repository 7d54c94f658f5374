"""The engines as the proxy sees them: an address, whether it may get traffic, and how busy it is.

Health and weights are two things: an engine may be alive and hold the wrong version, and then it gets no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mailboat.island.sidecar.types import Keyless, Unavailable

UNTRIED = "The engine has no weights of this run yet."


@dataclass(eq=False)
class Upstream:
    """One engine's HTTP side. ``fence``: why it gets no traffic, empty when it may. ``keyed``: routes whose requests
    carry a key of its prefix cache, of those where that depends on the build.
    """

    url: str
    fence: str = UNTRIED
    keyed: frozenset[str] = frozenset()
    busy: int = 0

    @property
    def open(self) -> bool:
        """Whether it may get traffic."""
        return not self.fence


class Upstreams:
    """The engines of an island."""

    def __init__(self, members: Sequence[Upstream]) -> None:
        self.members = tuple(members)

    def choose(self, avoid: frozenset[Upstream] = frozenset(), *, keyed: str = "") -> Upstream:
        """The least busy open engine, of those that take a key on the route ``keyed`` if one is named. Raises
        Unavailable with the reason, and Keyless when no engine takes one.
        """
        able = [upstream for upstream in self.members if not keyed or keyed in upstream.keyed]
        if candidates := [upstream for upstream in able if upstream.open and upstream not in avoid]:
            return min(candidates, key=lambda upstream: upstream.busy)
        if not able and not self.reason:
            raise Keyless(keyed)
        raise Unavailable(self.reason or _fences(able) or "No engine can be reached; try again.")

    @property
    def reason(self) -> str:
        """Why no engine gets traffic; empty when one does."""
        if not self.members:
            return "This island has no engine that answers requests."
        if any(upstream.open for upstream in self.members):
            return ""
        return _fences(self.members)

    @property
    def told(self) -> str:
        """Troubles of engines that were met so far; empty when none was."""
        return _fences([one for one in self.members if one.fence != UNTRIED])


def _fences(members: Sequence[Upstream]) -> str:
    """Why those of ``members`` that get no traffic get none; empty when all do."""
    return "; ".join(dict.fromkeys(one.fence for one in members if not one.open))
