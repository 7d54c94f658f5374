"""Tensors on an accelerator, compared where they lie: what changed travels to the host, and sums to prove it by.

Old bytes stay on the device up to a stated budget; those of other tensors come from the publisher's copy, through
pinned memory. Nothing here is believed: whoever builds from it compares the sums of what was built with those of the
tensors (docs/adr/changes-found-in-place.md).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.source import Bytes
from mailboat.digest import seeds
from mailboat.errors import DeviceUnavailable
from mailboat.image import Image
from mailboat.patch.backends import DEVICE, gpu_kernels

_log = logging.getLogger(__name__)

DEVICE_BYTES = 2 << 30
PINNED_BYTES = 32 << 20  # each of two buffers, on the host and on the device
SLICE = 1 << 26  # elements that a kernel looks at in one go
# Where more than one element in so many may have changed, a list of them is larger than the tensor; few never matter.
SHARE, FEW = 8, 1024
_REPLICA_SEEDS = (1, 2)


@dataclass(frozen=True, slots=True)
class Found:
    """What the host is told of a tensor: its sums, and its coding elements that may have changed (`positions`
    ascending, int64, in the whole tensor; `elements`: what they are now, `width` bytes each).
    """

    sums: tuple[int, int]
    positions: npt.NDArray[np.int64]
    elements: Bytes
    width: int

    def inside(self, first: int, elements: int) -> tuple[npt.NDArray[np.uint32], Bytes]:
        """The same for `elements` elements from `first` on; positions count from there."""
        start, end = np.searchsorted(self.positions, (first, first + elements)).tolist()
        positions = (self.positions[start:end] - first).astype(np.uint32)
        return positions, self.elements[start * self.width : end * self.width]


class OnDevice:
    """A tensor's bytes where it lies, copied to the host as they are read; what wrote it must be done by then."""

    def __init__(self, value: Any) -> None:
        self._bytes = bits(value).view(_torch().uint8)
        if value.is_cuda:
            # Whoever reads may do it from another thread, whose stream knows nothing of this one.
            _torch().cuda.current_stream(value.device).synchronize()

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out))."""
        _torch().from_numpy(out).copy_(self._bytes[offset : offset + out.size])


def longest_list(elements: int) -> int:
    """How many changes of so many elements are listed at most."""
    return max(FEW, elements // SHARE)


def on_accelerator(value: Any) -> bool:
    """Whether kernels compute where a tensor lies: on a GPU; with MAILBOAT_DEVICE=interpreter on the CPU too."""
    if not hasattr(value, "is_cuda") or not value.numel():
        return False
    kind = value.device.type
    return _has_kernels() if kind == "cuda" else kind == "cpu" and os.environ.get(DEVICE) == "interpreter"


def bits(value: Any) -> Any:
    """A tensor's elements, row after row, as integers of their size; itself where it is dense."""
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return gpu_kernels("changes").integers(dense).reshape(-1)


def replica_sums(value: Any) -> bytes:
    """16 bytes that tell replicas apart, computed where one lies."""
    row = bits(value).view(_torch().uint8).view(1, -1)
    return b"".join(part.to_bytes(8, "little") for part in gpu_kernels("sums").tensor_sums(row, _REPLICA_SEEDS))


class OldBytes:
    """The tensors of the last ready version on accelerators: up to `budget` bytes, and what was found to change them.

    `begin`, then `find` for each tensor, then `end` with the state that was built from it.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: dict[int, Any] = {}
        self._moved: dict[int, list[tuple[Any, Any]] | None] = {}
        self._state: str | None = None
        self._target: str | None = None

    def begin(self, image: Image) -> None:
        """Bring what is held to the state of `image`."""
        if self._target == image.digest != self._state:
            scatter = gpu_kernels("changes").scatter
            held, self._held = self._held, {}  # what was not looked at this time does not come along
            for index, moved in self._moved.items():
                for positions, elements in moved or ():
                    scatter(held[index], positions, elements)
                if moved is not None:
                    self._held[index] = held[index]
        elif self._state != image.digest:
            self._held.clear()
        self._state, self._target = image.digest, None
        self._moved.clear()

    def end(self, target: str) -> None:
        """What was found since `begin` leads to this state."""
        self._target = target

    def forget(self) -> None:
        """Hold nothing: it was not what it should be."""
        self._held.clear()
        self._moved.clear()
        self._state = self._target = None

    def find(self, image: Image, index: int, value: Any, known: Any = None) -> Found | None:
        """What changed in a tensor since `image`; None where so much did that it is better read.

        `known`: positions (int64, on the device, ascending) that are all that can have changed: nothing is compared.
        """
        flat = bits(value)
        if known is not None and known.numel() <= longest_list(flat.numel()):
            self._held.pop(index, None)
            positions, elements = _to_host(known), _to_host(flat[known])
        else:
            try:
                positions, elements = self._compare(image, index, flat)
            except gpu_kernels("changes").TooManyChangesError:
                self._moved[index] = None
                return None
        tensor = image.inventory.tensors[index]
        rows = flat.view(_torch().uint8).view(tensor.rows, tensor.row_bytes)
        sums = gpu_kernels("sums").tensor_sums(rows, seeds(tensor))
        return Found(sums, positions, elements.view(np.uint8), flat.element_size())

    def _compare(self, image: Image, index: int, flat: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Positions and new elements, on the host. A longer list is never made."""
        diff, most = gpu_kernels("changes").diff, longest_list(flat.numel())
        old = self._resident(image, index, flat)
        moved, told = [], []
        for first, piece in _staged(image, index, flat) if old is None else slices(old):
            found = diff(piece, flat[first : first + piece.numel()], first=first, at_most=most)
            most -= found.positions.numel()
            told.append((_to_host(found.positions), _to_host(found.new)))
            if old is not None:
                moved.append((found.positions, found.new))
        if old is not None:
            self._moved[index] = moved
        return np.concatenate([where for where, _ in told]), np.concatenate([new for _, new in told])

    def _resident(self, image: Image, index: int, flat: Any) -> Any:
        """The old elements on the tensor's device; None where they do not fit into the budget."""
        held = self._held.pop(index, None)
        if held is None or held.device != flat.device:
            held = None
            if sum(other.nbytes for other in self._held.values()) + flat.nbytes > self._budget:
                return None
            held = _torch().empty_like(flat)
            for first, piece in _staged(image, index, flat):
                held[first : first + piece.numel()] = piece
        self._held[index] = held
        return held


def slices(flat: Any) -> Iterator[tuple[int, Any]]:
    """(first element, elements) of pieces of a flat tensor: what lists and sorts of their changes take is bounded."""
    return ((first, flat[first : first + SLICE]) for first in range(0, flat.numel(), SLICE))


def _staged(image: Image, index: int, like: Any) -> Iterator[tuple[int, Any]]:
    """The image's bytes of a tensor on the device of `like`: (first element, elements), valid until the next but one.

    While the device works on one piece the next is read and on its way.
    """
    size = min(PINNED_BYTES, like.nbytes)
    buffers = [_Staging(size, like) for _ in range(2 if size < like.nbytes else 1)]
    starts = range(0, like.nbytes, size)
    ahead = buffers[0].send(image, index, 0, size)
    for number, start in enumerate(starts):
        piece = ahead
        if number + 1 < len(starts):
            after = starts[number + 1]
            ahead = buffers[(number + 1) % 2].send(image, index, after, min(size, like.nbytes - after))
        yield start // like.element_size(), piece


class _Staging:
    """A pinned buffer and one on the device. torch keeps pinned memory for the next one that asks."""

    def __init__(self, size: int, like: Any) -> None:
        torch = _torch()
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda)
        self._there = torch.empty(size, dtype=torch.uint8, device=like.device)
        self._dtype = like.dtype
        self._sent: Any = None

    def send(self, image: Image, index: int, start: int, size: int) -> Any:
        """Read bytes of the image and copy them, ordered with the current stream."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy out of this memory
        image.read(index, start, self._host[:size].numpy())
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        if self._there.is_cuda:
            self._sent = _torch().cuda.current_stream(self._there.device).record_event()
        return self._there[:size].view(self._dtype)


def _to_host(tensor: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


@cache
def _has_kernels() -> bool:
    try:
        gpu_kernels("changes")
    except DeviceUnavailable as problem:
        _log.warning("Tensors on a GPU are copied to the host before they are compared. %s", problem)
        return False
    return True


def _torch() -> Any:
    return sys.modules["torch"]
