"""What differs between two versions of a run: tensors that came, went or hold other bits. Strong digests decide; no
weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controlplane.dashboard.rows.tensors import Named, scan
from controlplane.registry import blobs
from controlplane.registry.errors import Missing
from controlplane.registry.models import Version

LISTED = 200
SUM_BYTES, STRONG_BYTES = 16, 32


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same in both. `how`: changed, added or removed."""

    tensor: Named
    how: str
    before: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first differences and their counts; side files by path."""

    shown: tuple[Difference, ...]
    changed: int
    added: int
    removed: int
    same: int
    side_files: tuple[tuple[str, str], ...]

    @property
    def differing(self) -> int:
        """Tensors that are not the same."""
        return self.changed + self.added + self.removed


def compare(one: Version, other: Version) -> Comparison | None:
    """From `one` to `other`; None when one of them has no digests on record."""
    if not (one.digests_sha256 and other.digests_sha256 and one.inventory and other.inventory):
        return None
    try:
        before, after = _strong(one), _strong(other)
    except Missing:  # retention took the blob
        return None
    if one.inventory_id == other.inventory_id and len(before) == len(after):
        differs = (before != after).any(axis=1)
        places = set(np.flatnonzero(differs)[:LISTED].tolist())
        shown = (
            [Difference(row, "changed", "") for row in scan(_document(one)) if row.index in places] if places else []
        )
        count = int(differs.sum())
        return Comparison(tuple(shown), count, 0, 0, len(before) - count, _side_files(one, other))
    return _by_name(one, other, before, after)


def _by_name(one: Version, other: Version, before: np.ndarray, after: np.ndarray) -> Comparison:
    """Two inventories: tensors belong together that have the same name."""
    old = {row.name: row for row in scan(_document(one))}
    shown: list[Difference] = []
    changed = added = same = 0
    for row in scan(_document(other)):
        was = old.pop(row.name, None)
        if was is None:
            added += 1
            shown.append(Difference(row, "added", ""))
        elif (was.dtype, was.shape) != (row.dtype, row.shape) or (before[was.index] != after[row.index]).any():
            changed += 1
            shown.append(Difference(row, "changed", f"{was.dtype} {was.shape_words}"))
        else:
            same += 1
        del shown[LISTED:]
    shown += [Difference(row, "removed", "") for row in old.values()]
    return Comparison(tuple(shown[:LISTED]), changed, added, len(old), same, _side_files(one, other))


def _strong(version: Version) -> np.ndarray:
    """The strong digests, one row per tensor."""
    raw = blobs.store().read(version.run_id, version.digests_sha256)
    count = len(raw) // (SUM_BYTES + STRONG_BYTES)
    return np.frombuffer(raw, np.uint8, count * STRONG_BYTES, count * SUM_BYTES).reshape(count, STRONG_BYTES)


def _document(version: Version) -> bytes:
    assert version.inventory is not None  # noqa: S101  `compare` has looked
    return blobs.store().read(version.run_id, version.inventory.sha256)


def _side_files(one: Version, other: Version) -> tuple[tuple[str, str], ...]:
    old = {item["path"]: item["sha256"] for item in one.side_files}
    new = {item["path"]: item["sha256"] for item in other.side_files}
    found = []
    for path in sorted({*old, *new}):
        if path not in new:
            found.append((path, "removed"))
        elif path not in old:
            found.append((path, "added"))
        elif old[path] != new[path]:
            found.append((path, "changed"))
    return tuple(found)
