"""The kernels as the CPU backend offers them: NumPy arrays in, NumPy arrays out, computed on a device.

Every function but `quantise` has the name, the arguments and the bits of its namesake among the library's compiled
functions; whatever has no kernel is taken from there. Data crosses to the device and back with each call, so this is
for blocks that come from files; tensors that live on the device use `changes`, `sums` and `refresh` directly.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import changes, numbers, refresh, sums

Array = NDArray[Any]
_MODULUS = 1 << 64
_GROUPED = {"nvfp4": numbers.NVFP4, "mxfp4": numbers.MXFP4, "int4": numbers.INT4}
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

    def quantise(self, weights: Array, format: str, group: int, amax: int) -> tuple[Array, Array]:
        """Codes (bytes, a matrix) and scales of a matrix of finite BF16 bits (uint16) in a served format.

        `format`: "fp8-block", "fp8-channel", or "nvfp4", "mxfp4", "int4" with scales for groups of `group`; `amax`: for
        NVFP4 the BF16 bits of the tensor's largest magnitude.
        """
        (rows, columns), kind = weights.shape, _GROUPED.get(format)
        with _ONE_AT_A_TIME:
            master = self._there(weights, 2)
            codes = self._zeros(rows, columns if kind is None else columns // 2, torch.uint8)
            if kind is None:
                block = (numbers.FP8_BLOCK, numbers.FP8_BLOCK) if format == "fp8-block" else (1, columns)
                scales = self._zeros(-(-rows // block[0]), -(-columns // block[1]), torch.float32)
                refresh.refresh_fp8(master, codes, scales, block, expected=codes.numel())
            else:
                scales = self._zeros(rows, columns // group, torch.int16 if kind == numbers.INT4 else torch.uint8)
                whole = self._zeros(1, 1, torch.float32)
                refresh.refresh_groups(master, codes, scales, whole, kind, group, expected=codes.numel(), amax=amax)
            return codes.cpu().numpy(), scales.cpu().numpy()

    def _zeros(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((rows, columns), dtype=dtype, device=self.device)

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
