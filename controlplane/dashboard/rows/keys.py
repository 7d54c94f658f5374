"""Rows of publishers' keys: those of a run, and those that an island trusts beside them."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.dashboard.badges import Badge
from controlplane.fleet.models import Island
from controlplane.registry import keys
from controlplane.registry.models import Run, RunKey
from mailboat.identity import fingerprint


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key of a run."""

    key: RunKey
    fingerprint: str
    state: Badge
    works: bool


@dataclass(frozen=True, slots=True)
class TrustRow:
    """One key that an island trusts, and what the run says of it."""

    fingerprint: str
    name: str
    state: Badge


def key_rows(run: Run) -> list[KeyRow]:
    """The keys of a run, those in use first."""
    rows = [KeyRow(key, fingerprint(key.public_key), _state(key), key.revoked_at is None) for key in keys.of_run(run)]
    return sorted(rows, key=lambda row: not row.works)


def trust_rows(island: Island) -> list[TrustRow]:
    """The keys without whose signature the island goes to no version."""
    known = {key.public_key: key for key in keys.of_run(island.run)} if island.trusted_keys else {}
    return [_trusted(public_key, known.get(public_key)) for public_key in island.trusted_keys]


def _trusted(public_key: str, key: RunKey | None) -> TrustRow:
    if key is None:
        words = "The run has no such key: versions that its other keys sign are refused there."
        return TrustRow(fingerprint(public_key), "", Badge("Not of this run", "warn", "warn", words))
    return TrustRow(fingerprint(public_key), key.name, _state(key))


def _state(key: RunKey) -> Badge:
    if key.revoked_at is None:
        return Badge("In use", "check", "good")
    return Badge("Revoked", "lost", "bad", f"{key.revoked_by}: {key.revoked_reason}")
