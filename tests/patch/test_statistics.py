"""Statistics per tensor: what the tables say, as columns whose bytes are those of docs/format/statistics.md."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mailboat.checkpoint.source import ArraySource
from mailboat.errors import PatchError
from mailboat.patch import PatchFile, build_patch, inspect
from mailboat.patch.statistics import Statistics, measure, names


def _source(arrays: dict[str, np.ndarray]) -> ArraySource:
    return ArraySource(arrays)


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    rng = np.random.default_rng(7)
    base = {name: rng.integers(0, 1 << 16, 4000, np.uint16) for name in "abcd"}
    after = {name: array.copy() for name, array in base.items()}
    after["b"][::400] ^= 1
    after["d"][:] = rng.integers(0, 1 << 16, 4000, np.uint16)
    build_patch(_source(base), _source(after), tmp_path / "p.mbp")
    return tmp_path / "p.mbp"


def test_columns_agree_with_the_inspection(patch: Path) -> None:
    with PatchFile.open(patch) as part:
        found = measure([part], 4)
        assert found.changed.sum() == part.changed
    told = {int(row["name"]): row for row in inspect([patch])["tensors"]}
    for index in range(4):
        row = told.get(index, {"changed": 0, "bytes": 0, "encoding": "same"})
        assert (found.changed[index], found.sizes[index]) == (row["changed"], row["bytes"])
        assert "+".join(sorted(names(int(found.encodings[index])))) == row["encoding"].replace("same", "")
    assert found.changed[0] == found.changed[2] == 0 < found.changed[1] == 10


def test_the_bytes_are_those_of_the_page(patch: Path) -> None:
    with PatchFile.open(patch) as part:
        found = measure([part], 4)
    raw = found.to_bytes()
    assert raw[:8] == b"MBSTAT1\n" and struct.unpack_from("<Q", raw, 8) == (4,)
    assert struct.unpack_from("<4Q", raw, 16) == tuple(found.changed.tolist())
    assert struct.unpack_from("<4Q", raw, 16 + 32) == tuple(found.sizes.tolist())
    assert raw[16 + 64 :] == bytes(found.encodings.tolist()) and len(raw) == 16 + 17 * 4
    again = Statistics.from_bytes(raw)
    assert again.to_bytes() == raw


@pytest.mark.parametrize("cut", [0, 7, 15, 16, -1])
def test_damaged_statistics_are_refused(patch: Path, cut: int) -> None:
    with PatchFile.open(patch) as part:
        raw = measure([part], 4).to_bytes()
    for bad in (raw[:cut], raw + b"\0", b"X" + raw[1:], raw[:-1] + b"\xff", raw[:8] + b"\xff" * 8 + raw[16:]):
        with pytest.raises(PatchError):
            Statistics.from_bytes(bad)


def test_a_tensor_beyond_the_inventory_is_refused(patch: Path) -> None:
    with PatchFile.open(patch) as part, pytest.raises(PatchError, match="beyond"):
        measure([part], 2)
