"""What the rows of an island mean: health and sync status, each with its reason in words. Derived, never stored.

Two axes that are apart: an island can be healthy and behind, or lost and current. Only a verified report counts as
being at a version; what a heartbeat claims can only take that away.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

LATE_BEATS = 3  # heartbeats missed before an island is degraded
LOST_BEATS = 6  # ... and lost
CLOCK_TOLERANCE_SECONDS = 60.0
LATE = "The last heartbeat came"


class Health(StrEnum):
    """Whether the island is there and well."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    LOST = "lost"
    DRAINING = "draining"
    DISABLED = "disabled"


class Sync(StrEnum):
    """Where the island stands against its channel."""

    CURRENT = "current"
    BEHIND = "behind"
    PINNED = "pinned"
    AHEAD = "ahead"
    UNKNOWN = "unknown"


class Facts(NamedTuple):  # a tuple is made in a third of the time of a frozen class, and a page makes a thousand
    """What the database knows, with ages by its own clock."""

    enabled: bool
    disabled_reason: str
    phase: str
    reason: str
    last_error: str
    seconds_since_seen: float | None
    heartbeat_seconds: int
    clock_skew_seconds: float | None
    claimed_version: int | None
    claimed_digest: str
    verified_version: int | None
    verified_digest: str
    head_version: int | None  # of the channel that it follows: its own one while it is pinned
    head_digest: str
    pinned: bool = False
    pending: bool = False
    revoked: bool = False
    draining: bool = False
    drain_seconds_left: float = 0.0
    active_requests: int | None = None
    foreign_release: str = ""  # the island's, where this control plane does not work with it

    @property
    def drained(self) -> bool:
        """Nothing runs on it any more, or nothing is waited for any longer."""
        return self.draining and (self.active_requests == 0 or self.drain_seconds_left <= 0)


def health(  # noqa: PLR0911  one line per reason
    facts: Facts,
) -> tuple[Health, str]:
    """The state and one sentence."""
    if facts.pending:
        return Health.DISABLED, "It waits until an operator approves its key."
    if facts.revoked:
        return Health.DISABLED, "Its credential was revoked; enrol it again or remove it."
    if not facts.enabled:
        return Health.DISABLED, facts.disabled_reason or "Switched off by an operator."
    if facts.draining:
        return Health.DRAINING, _drain(facts)
    if facts.seconds_since_seen is None:
        return Health.LOST, "Enrolled, but never heard of."
    silent = int(facts.seconds_since_seen)
    if facts.seconds_since_seen > LOST_BEATS * facts.heartbeat_seconds:
        return Health.LOST, f"No heartbeat for {silent} s."
    if facts.seconds_since_seen > LATE_BEATS * facts.heartbeat_seconds:
        return Health.DEGRADED, f"{LATE} {silent} s ago."
    if facts.phase in {"error", "fenced"}:
        return Health.DEGRADED, facts.reason or f"The island reports {facts.phase}."
    if facts.foreign_release:
        return Health.DEGRADED, (
            f"It runs release {facts.foreign_release}, which does not work with this control plane's; upgrade it."
        )
    if facts.clock_skew_seconds is not None and abs(facts.clock_skew_seconds) > CLOCK_TOLERANCE_SECONDS:
        direction = "ahead" if facts.clock_skew_seconds > 0 else "behind"
        return Health.HEALTHY, f"Its clock is {abs(int(facts.clock_skew_seconds))} s {direction}."
    return Health.HEALTHY, "Heartbeats arrive in time."


def _drain(facts: Facts) -> str:
    if facts.drained:
        left = facts.active_requests or 0
        return f"Drained, with {left} requests given up at the deadline." if left else "Drained: no request is active."
    active = "an unknown number of" if facts.active_requests is None else facts.active_requests
    return f"Draining: {active} requests are active, {int(facts.drain_seconds_left)} s are left."


def sync(  # noqa: PLR0911  one line per reason
    facts: Facts,
) -> tuple[Sync, str]:
    """The state and one sentence."""
    if facts.head_version is None:
        return Sync.UNKNOWN, "The channel has no version yet."
    if facts.verified_version is None:
        said = facts.last_error or facts.reason
        return Sync.UNKNOWN, " ".join(filter(None, ["No verified sync has been reported yet.", said]))
    if facts.claimed_digest != facts.verified_digest:
        holds = "nothing" if not facts.claimed_digest else f"{facts.claimed_digest[:12]}"
        return Sync.UNKNOWN, f"It says that it holds {holds}; its last verified version was {facts.verified_version}."
    if facts.verified_digest == facts.head_digest and facts.verified_version == facts.head_version:
        if facts.pinned:
            return Sync.PINNED, f"Pinned to version {facts.head_version}."
        return Sync.CURRENT, f"At version {facts.head_version}."
    if facts.verified_version > facts.head_version and facts.pinned:
        return Sync.AHEAD, f"At version {facts.verified_version}, on its way back to {facts.head_version}, its pin."
    if facts.verified_version > facts.head_version:
        return Sync.AHEAD, f"At version {facts.verified_version}; the channel went back to {facts.head_version}."
    why = (
        facts.last_error
        or facts.reason
        or {"idle": "It has not started the sync yet."}.get(facts.phase, f"It is {facts.phase}.")
    )
    return Sync.BEHIND, f"At version {facts.verified_version} of {facts.head_version}. {why}"
