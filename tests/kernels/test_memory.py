"""What a worker takes on its device, as docs/operators.md states it: tensors of 128 MiB at most, whatever it works on.

Tensors that the kernels' callers allocate are counted, those that would cross to a GPU included, on blocks of two
sizes; what the largest block takes follows, because all of it grows with the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mailboat import compiled
from mailboat.patch.backends import gpu_kernels, kernels
from mailboat.patch.format import BLOCK_ELEMENTS, rice_parameter
from mailboat.patch.scratch import address_of
from mailboat.quantise import source as quantise_source
from tests.kernels.conftest import WANTED

STATED = 128 << 20
SIZES = 1 << 10, 1 << 11

pytestmark = pytest.mark.skipif(WANTED != "interpreter", reason="allocations are counted on the CPU")


class Counted(TorchDispatchMode):
    """The bytes of all tensors that are alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if hasattr(tensor, "untyped_storage"):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))
        return result


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's device, to which everything is copied as to a GPU."""
    monkeypatch.setenv("MAILBOAT_DEVICE", "interpreter")
    there = kernels()._there
    monkeypatch.setattr(gpu_kernels("changes"), "FEW", 0)  # as in a block of 2^20, where it is a sixteenth
    monkeypatch.setattr(kernels(), "_there", lambda array, width, **_: there(array, width, copy=True))


def most(work: Callable[[int], None], elements: int) -> float:
    """What work on so many elements takes, from what it takes on fewer."""
    taken = []
    for size in SIZES:
        with Counted() as counted:
            work(size)
        taken.append(counted.most)
    return taken[1] + (taken[1] - taken[0]) / (SIZES[1] - SIZES[0]) * (elements - SIZES[1])


def words(elements: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 63, elements * width // 8, dtype=np.uint64)


@pytest.mark.parametrize("width", [2, 8])
def test_comparing_blocks_of_which_everything_changed(width: int) -> None:
    def compare(elements: int) -> None:
        old, room = words(elements, width, 1), np.empty(elements * width, np.uint8)
        place = (elements * width, 0, 0, -1, np.uint64(1), np.uint64(2), np.uint64(7), np.uint64(255))
        positions, sums, counts = np.empty(elements, np.uint32), np.zeros(2, np.uint64), np.zeros((3, 256), np.int64)
        found = kernels().compare(
            old, ~old, width, elements, *place, 1, elements, positions, room, counts, sums
        )  # fmt: skip
        assert found == elements

    assert most(compare, BLOCK_ELEMENTS) < STATED


def test_decoding_positional_blocks_of_which_everything_changed() -> None:
    """One block here stands for as many as are decoded together, of the widest elements."""
    width = 8

    def decode(elements: int) -> None:
        old, positions = words(elements, width, 1), np.arange(elements, dtype=np.uint32)
        codes = np.zeros(elements, np.uint8)
        rice = rice_parameter(elements, elements)
        codes = codes[: compiled.rice_encode(positions, rice, codes)]
        values, literals = np.empty(elements, np.uint8), np.empty(elements * width, np.uint8)
        count = compiled.encode_values(old, ~old, positions, width, 0, values, literals)
        row = (address_of(old), old.size, elements, width, 0, elements, rice, codes.size, count * width)
        change, new = np.zeros((1, 2), np.uint64), np.empty(old.size, np.uint64)
        status = kernels().decode_positional(
            np.array([[*row, elements * width, 0, 0]]), np.zeros((1, 2), np.uint64), codes, values,
            literals[: count * width], positions, new, change,
        )  # fmt: skip
        assert status == 0 and (new == ~old).all()

    at_once = max(BLOCK_ELEMENTS, gpu_kernels("arrays")._AT_ONCE)
    assert most(decode, at_once) < STATED


@pytest.mark.parametrize("format", ["fp8-block", "fp8-channel", "nvfp4", "mxfp4", "int4"])
def test_quantising_a_stripe(format: str) -> None:
    def quantise(elements: int) -> None:
        weights = np.random.default_rng(1).integers(0x3C00, 0x4000, (elements // 128, 128), np.uint16)
        kernels().quantise(weights, format, {"nvfp4": 16, "mxfp4": 32}.get(format, 64), 0x4000)

    assert most(quantise, quantise_source._STRIPE // 2) < STATED
