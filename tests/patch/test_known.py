"""Targets that say what changed give the files of targets that are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mailboat.checkpoint.source import ArraySource, Bytes
from mailboat.patch.blocks import Positions
from mailboat.patch.build import build_patch
from mailboat.trainer.in_place import Found

Arrays = dict[str, np.ndarray]
DTYPES = {"many": "BF16", "rows": "F32", "bytes": "U8", "same": "BF16"}


class Known(ArraySource):
    """Reading what is known would give something else."""

    def __init__(self, arrays: Arrays, found: dict[str, Found]) -> None:
        super().__init__(arrays, dtypes=DTYPES)
        self._found = [found.get(tensor.name) for tensor in self.inventory.tensors]

    def changed(self, index: int, first: int, elements: int) -> tuple[Positions, Bytes] | None:
        held = self._found[index]
        return None if held is None else held.inside(first, elements)


def states() -> tuple[Arrays, Arrays]:
    """Several blocks, rows that are longer than one, a block without a change, one that is replaced."""
    random = np.random.default_rng(2)
    old = {
        "many": random.integers(0, 1 << 16, (2500, 1000), np.uint16),
        "rows": random.integers(0, 1 << 32, (2, (1 << 20) + 333), np.uint32),
        "bytes": random.integers(0, 256, (123, 457), np.uint8),
        "same": random.integers(0, 1 << 16, (30, 7), np.uint16),
    }
    new = {name: value.copy() for name, value in old.items()}
    for name, share in [("many", 0.003), ("rows", 0.001), ("bytes", 0.9)]:
        flat = new[name].reshape(-1)
        where = np.flatnonzero(random.random(flat.size) < share)
        flat[where] += random.integers(1, 3, where.size).astype(flat.dtype)
    new["many"].reshape(-1)[1 << 20 : 1 << 21] = old["many"].reshape(-1)[1 << 20 : 1 << 21]
    return old, new


@pytest.mark.parametrize("more", [0, 500])
def test_files_are_those_of_a_comparison(tmp_path: Path, more: int) -> None:
    """Also where positions are named that did not change."""
    old, new = states()
    base = ArraySource(old, dtypes=DTYPES)
    build_patch(base, ArraySource(new, dtypes=DTYPES), tmp_path / "compared.mbp")
    found = {}
    for name in ("many", "rows", "bytes"):
        flat = new[name].reshape(-1)
        others = np.random.default_rng(3).integers(0, flat.size, more)
        positions = np.union1d(np.flatnonzero(flat != old[name].reshape(-1)), others)
        found[name] = Found((0, 0), positions, flat[positions].view(np.uint8), flat.itemsize)
    unread = new | {name: np.zeros_like(new[name]) for name in found}
    for threads in (1, 2):
        build_patch(base, Known(unread, found), tmp_path / "known.mbp", threads=threads)
        assert (tmp_path / "known.mbp").read_bytes() == (tmp_path / "compared.mbp").read_bytes()
