"""The kernels as the CPU backend offers them: NumPy arrays in, NumPy arrays out, computed on a device.

Every function has the name, the arguments and the bits of its namesake among the library's compiled functions; whatever
has no kernel is taken from there. Data crosses to the device and back with each call, so this is for blocks that come
from files; tensors that live on the device use `changes`, `sums` and `refresh` directly.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import changes, sums

Array = NDArray[Any]
_MODULUS = 1 << 64
# The interpreter can't run two kernels at once, and a GPU gains nothing from it.
_ONE_AT_A_TIME = threading.Lock()


class Arrays:
    """The backend on `device` ("cuda", "cuda:1", "cpu" for the interpreter); `rest` has what no kernel does."""

    def __init__(self, device: str, rest: ModuleType) -> None:
        self.device = device
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)

    def find_changes(self, old: Array, new: Array, width: int, positions: Array) -> int:
        """Positions (uint32, ascending) of the elements that differ between two blocks; returns how many."""
        with _ONE_AT_A_TIME:
            found = changes.diff(self._there(old, width), self._there(new, width)).positions.cpu().numpy()
        positions[: found.size] = found
        return int(found.size)

    def sum_rows(
        self, buffer: Array, piece_bytes: int, row0: int, word0: int, seed_a: int, seed_b: int, out: Array
    ) -> None:
        """Add to out[0:2] the sums of a buffer that holds pieces of consecutive rows."""
        rows = buffer[: buffer.size // piece_bytes * piece_bytes].reshape(-1, piece_bytes)
        with _ONE_AT_A_TIME:
            pair = sums.tensor_sums(self._there(rows, 1), (int(seed_a), int(seed_b)), row0=int(row0), word0=int(word0))
        _add(out, pair)

    def sum_changes(
        self, old: Array, new: Array, positions: Array, width: int, piece_bytes: int, row0: int, word0: int,
        seed_a: int, seed_b: int, out: Array,
    ) -> None:  # fmt: skip
        """Add to out[0:2] what the changes at `positions` do to the sums of a block."""
        values = new.reshape(-1).view(np.uint8).view(f"u{width}")[positions]
        rows = old[: old.size // piece_bytes * piece_bytes].reshape(-1, piece_bytes)
        with _ONE_AT_A_TIME:
            where = torch.from_numpy(positions.astype(np.int64)).to(self.device)
            held = self._there(rows, width, copy=True)
            pair = sums.apply_with_sums(
                held, where, self._there(values, width), (int(seed_a), int(seed_b)), row0=int(row0), word0=int(word0)
            )
        _add(out, pair)

    def _there(self, array: Array, width: int, *, copy: bool = False) -> torch.Tensor:
        """The array's bytes on the device as integers of `width` bytes; on the CPU a view unless `copy`."""
        kind = np.uint8 if width == 1 else np.dtype(f"i{width}")
        here = torch.from_numpy(_writable(array.view(np.uint8) if array.ndim > 1 else array).view(kind))
        return here.clone() if copy and self.device == "cpu" else here.to(self.device)


def _writable(array: Array) -> Array:
    """The array, or a copy where it is only lent for reading: torch asks for memory that it could write."""
    if array.flags.writeable:
        return array
    return np.array(array)


def _add(out: Array, pair: tuple[int, int]) -> None:
    for which, value in enumerate(pair):
        out[which] = np.uint64((int(out[which]) + value) % _MODULUS)
