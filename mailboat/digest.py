"""The two digests of a state: fast sums that find faults, strong digests that find forgery.

Sums follow the bytes wherever they lie and can be updated from changed words alone; they protect against nobody.  Strong
digests are BLAKE3 and decide what a state is.  Formats and formulas: docs/format/digests.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mailboat.checkpoint.inventory import Inventory, Tensor
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import TensorSource
from mailboat.errors import DigestMismatch

Sums = NDArray[np.uint64]
Strong = NDArray[np.uint8]
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class State:
    """A state by its digests: `sums` uint64 (N, 2), `strong` uint8 (N, 32), both in inventory order."""

    inventory: Inventory
    sums: Sums
    strong: Strong
    side_files: tuple[SideFile, ...]

    @cached_property
    def digest(self) -> str:
        """The state digest, 64 hex digits: content only, independent of shards and metadata."""
        return state_digest(self.inventory, self.strong, self.side_files)

    def digests_bytes(self) -> bytes:
        """Return the digests blob: N * 16 bytes of sums, then N * 32 bytes of strong digests."""
        return self.sums.astype("<u8").tobytes() + self.strong.tobytes()

    @classmethod
    def from_parts(cls, inventory: Inventory, digests: bytes, side_files: tuple[SideFile, ...]) -> State:
        """Join what a manifest names; raise DigestMismatch when the blob's size doesn't fit the inventory."""
        count = len(inventory.tensors)
        if len(digests) != count * 48:
            raise DigestMismatch(f"The digests blob has {len(digests)} bytes where {count} tensors need {count * 48}.")
        sums = np.frombuffer(digests, "<u8", count * 2).astype(np.uint64).reshape(count, 2)
        strong = np.frombuffer(digests, np.uint8, count * 32, count * 16).reshape(count, 32).copy()
        return cls(inventory, sums, strong, side_files)


def state_digest(inventory: Inventory, strong: Strong, side_files: tuple[SideFile, ...]) -> str:
    """Return SHA-256 over inventory digest, strong digests and side files, 64 hex digits."""
    digest = hashlib.sha256(b"mailboat-state-1\n" + bytes.fromhex(inventory.digest))
    digest.update(len(inventory.tensors).to_bytes(8, "little") + strong.tobytes())
    digest.update(len(side_files).to_bytes(8, "little"))
    for file in sorted(side_files, key=lambda file: file.path):
        path = file.path.encode()
        digest.update(len(path).to_bytes(8, "little") + path)
        digest.update(file.size.to_bytes(8, "little") + bytes.fromhex(file.sha256))
    return digest.hexdigest()


def seeds(tensor: Tensor) -> tuple[int, int]:
    """Return the two 64-bit seeds of a tensor's sum."""
    shape = ",".join(map(str, tensor.shape))
    text = f"mailboat-sum-1\0{tensor.component}\0{tensor.name}\0{tensor.dtype}\0{shape}"
    raw = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")


def measure(source: TensorSource, *, threads: int | None = None, progress: Progress | None = None) -> State:
    """Read every tensor once and return its sums and strong digests."""
    raise NotImplementedError


def measure_sums(source: TensorSource, *, threads: int | None = None, progress: Progress | None = None) -> Sums:
    """Read every tensor once and return its sums, uint64 (N, 2)."""
    raise NotImplementedError
