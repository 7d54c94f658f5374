"""The words of the sidecar: what requests ask for, what answers say, which states there are.

Everything in the sidecar may depend on this page; it must never depend on anything, not even on the rest of Mailboat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LARGEST_VERSION = 2**53 - 1  # what every JSON reader holds exactly
_KEYS = {"min_version", "exact_version"}


class CommitMode(StrEnum):
    """How requests that are running meet a commit."""

    IN_PLACE = "in_place"  # they stay in the engine and go on with the new weights
    DRAIN = "drain"  # they end first


class BadConstraint(ValueError):  # noqa: N818 - says what is bad
    """A version constraint that can't be understood; the text is the sentence for the client."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request asks of the version that answers it; None means no constraint. Exact wins over min."""

    minimum: int | None = None
    exact: int | None = None
    run: str | None = None

    @classmethod
    def parse(cls, body: Any, run: Any = None) -> Constraint:
        """Reads `weight_version` and `run_id` of a JSON body. Raises BadConstraint."""
        if run is not None and not (isinstance(run, str) and run):
            raise BadConstraint("run_id must be a run's name or id, as a string.")
        if body is None:
            return cls(run=run)
        if not isinstance(body, Mapping):
            raise BadConstraint("weight_version must be an object with min_version and exact_version.")
        if unknown := sorted(str(key)[:40] for key in body if key not in _KEYS):
            raise BadConstraint(f"weight_version has no field {unknown[0]!r}; it knows min_version and exact_version.")
        minimum = _version("min_version", body.get("min_version"))
        exact = _version("exact_version", body.get("exact_version"))
        return cls(None if exact is not None else minimum, exact, run)

    @classmethod
    def of_headers(cls, minimum: str | None, exact: str | None) -> Constraint:
        """Reads the values of `Mailboat-Min-Version` and `Mailboat-Exact-Version`. Raises BadConstraint."""
        low = _digits("Mailboat-Min-Version", minimum)
        pinned = _digits("Mailboat-Exact-Version", exact)
        return cls(None if pinned is not None else low, pinned)

    def joined(self, other: Constraint) -> Constraint:
        """This constraint of the body, or where it says nothing ``other`` of the headers. Raises BadConstraint."""
        if self.versioned and other.versioned and (self.minimum, self.exact) != (other.minimum, other.exact):
            raise BadConstraint("The body and the headers ask for different versions; send the constraint once.")
        chosen = self if self.versioned else other
        return Constraint(chosen.minimum, chosen.exact, self.run or other.run)

    @property
    def versioned(self) -> bool:
        """Whether it names a version."""
        return self.minimum is not None or self.exact is not None

    @property
    def pinned(self) -> bool:
        """Whether the request must be answered by one version from its first token to its last."""
        return self.exact is not None


def _version(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_VERSION:
        raise BadConstraint(f"{name} must be a whole number from 0 to {LARGEST_VERSION}, or null.")
    return value


def _digits(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    text = value.strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 16 or int(text) > LARGEST_VERSION:
        raise BadConstraint(f"The header {name} must be a whole number from 0 to {LARGEST_VERSION}.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Applied:
    """The version that the engines hold. ``turn`` counts commits, so that no two stretches share a cache key."""

    run: str
    run_id: str
    epoch: int
    version: int
    state: str
    turn: str = ""

    @property
    def label(self) -> str:
        """How engines and programs are told: `<run>/weight_v000007`."""
        return f"{self.run}/weight_v{self.version:06d}"

    def salt(self, own: str | None = None) -> str:
        """The key of the prefix cache while this version is held, for a client's ``own`` key or none.

        64 hex digits whatever goes in: vLLM takes 128 characters at most, and neither "@", "/", "\\" nor NUL.
        """
        # As JSON, so that no two different lists read the same.
        named = json.dumps([self.run_id, self.epoch, self.version, self.state, self.turn, own])
        return hashlib.blake2b(named.encode(), digest_size=32).hexdigest()

    def moves_lineage(self, other: Applied) -> bool:
        """Whether going to ``other`` changes run or epoch: then nothing may run across."""
        return (self.run_id, self.epoch) != (other.run_id, other.epoch)


@dataclass(frozen=True, slots=True)
class SyncView:
    """What the sync loop is doing, as `/server_info` shows it."""

    state: str = "idle"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the queue before a closed gate (``queued`` requests, ``wait`` seconds) and of a ``drain`` (seconds)."""

    queued: int = 1024
    wait: float = 30.0
    drain: float = 30.0
    give_ups: int = 3


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A request that is not admitted: what to answer."""

    status = 503
    kind = "EngineUnavailable"
    reason = "unavailable"  # as the metrics count it
    retry_after: int | None = 1

    def body(self) -> dict[str, Any]:
        """The JSON to answer with."""
        return {"error": {"type": self.kind, "retryable": self.retry_after is not None, "message": str(self)}}


class NotReady(Refusal):
    """The constraint can't be met now; trying again helps unless the message says never."""

    status = 409
    kind = "WeightVersionNotReady"
    reason = "version"

    def __init__(self, message: str, *, target: int, applied: int) -> None:
        self.target = target
        self.applied = applied
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Flat, as trainers know it."""
        return {
            "type": self.kind,
            "target_version": self.target,
            "applied": self.applied,
            "message": str(self),
        }


class Unavailable(Refusal):
    """No engine can take the request now."""


class Blocked(Refusal):
    """A route that clients may not call."""

    status = 403
    kind = "RouteBlocked"
    reason = "blocked"
    retry_after = None


class Keyless(Blocked):
    """A route whose requests can't be kept from prefix-cache entries of older weights."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} has no key here that would keep the engine's prefix cache of older weights from its answers; "
            "start the island with --commit-mode drain, which resets that cache, to use it."
        )


class Malformed(Refusal):
    """A request that can't be understood."""

    status = 400
    kind = "BadRequest"
    reason = "malformed"
    retry_after = None


class Slow(Malformed):
    """A body that does not come."""

    status = 408
    kind = "RequestTimeout"


class TooLarge(Malformed):
    """A body over the limit."""

    status = 413
    kind = "BodyTooLarge"
