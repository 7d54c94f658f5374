"""Statistics per tensor: what the tables say, as columns whose bytes are those of docs/format/statistics.md."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mailboat import digest
from mailboat.checkpoint.source import ArraySource
from mailboat.errors import PatchError
from mailboat.image import Image
from mailboat.patch import PatchFile, build_patch, inspect
from mailboat.patch.statistics import Statistics, measure, names
from tests.patch import models
from tests.patch.ranks import rank

NONE = np.zeros(4, np.uint64)
DTYPES = ("BF16", "C64", "F16", "F32", "F64", "F8_E4M3", "F8_E8M0", "I16", "I64", "I8", "U32", "U8")


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
        found = measure([part], NONE)
        assert found.changed.sum() == part.changed
    told = {int(row["name"]): row for row in inspect([patch])["tensors"]}
    for index in range(4):
        row = told.get(index, {"changed": 0, "bytes": 0, "encoding": "same"})
        assert (found.changed[index], found.sizes[index]) == (row["changed"], row["bytes"])
        assert "+".join(sorted(names(int(found.encodings[index])))) == row["encoding"].replace("same", "")
    assert found.changed[0] == found.changed[2] == 0 < found.changed[1] == 10


def test_the_bytes_are_those_of_the_page(patch: Path) -> None:
    with PatchFile.open(patch) as part:
        found = measure([part], np.array([0, 7, 0, 4], np.uint64))
    raw = found.to_bytes()
    assert raw[:8] == b"MBSTAT1\n" and struct.unpack_from("<Q", raw, 8) == (4,)
    assert struct.unpack_from("<4Q", raw, 16) == tuple(found.changed.tolist())
    assert struct.unpack_from("<4Q", raw, 16 + 32) == tuple(found.sizes.tolist())
    assert struct.unpack_from("<4Q", raw, 16 + 64) == (0, 7, 0, 4)
    assert raw[16 + 96 :] == bytes(found.encodings.tolist()) and len(raw) == 16 + 25 * 4
    again = Statistics.from_bytes(raw)
    assert again.to_bytes() == raw


@pytest.mark.parametrize("cut", [0, 7, 15, 16, -1])
def test_damaged_statistics_are_refused(patch: Path, cut: int) -> None:
    with PatchFile.open(patch) as part:
        raw = measure([part], NONE).to_bytes()
    steps = raw[: 16 + 64] + b"\x01" + raw[16 + 65 :]  # of a tensor that did not change
    for bad in (steps, raw[:cut], raw + b"\0", b"X" + raw[1:], raw[:-1] + b"\xff", raw[:8] + b"\xff" * 8 + raw[16:]):
        with pytest.raises(PatchError):
            Statistics.from_bytes(bad)


def test_a_tensor_beyond_the_inventory_is_refused(patch: Path) -> None:
    with PatchFile.open(patch) as part, pytest.raises(PatchError, match="beyond"):
        measure([part], NONE[:2])


def _expected(base: ArraySource, target: ArraySource) -> list[int]:
    """Steps of one of each tensor, element by element in plain Python."""
    found = []
    for index, tensor in enumerate(base.inventory.tensors):
        bits = 8 * tensor.width
        sides = [np.frombuffer(models.read(it, index), f"<u{tensor.width}").tolist() for it in (base, target)]
        ranks = [[rank(value, tensor.dtype, bits) for value in side] for side in sides]
        ups = [(after - before) % (1 << bits) for before, after in zip(*ranks, strict=True)]
        found.append(sum(up in {1, (1 << bits) - 1} for up in ups))
    return found


@pytest.mark.parametrize(("share", "step"), [(0.01, 2), (0.3, 1), (0.95, 2), (0.95, 0)])
def test_steps_of_one_are_counted_as_the_ranks_say(tmp_path: Path, share: float, step: int) -> None:
    """Whatever the encoding, and in whichever pieces the bytes are read."""
    before = {dtype: (dtype, (50, 64), models.random_bits(dtype, (50, 64), at)) for at, dtype in enumerate(DTYPES)}
    before["BF16"][2][:8] = np.array([0x8000, 0x0000, 0xFFFF, 0x7FFF], "<u2").view(np.uint8)
    base = models.source(before)
    width = {tensor.dtype: tensor.width for tensor in base.inventory.tensors}
    after = {d: (d, s, models.changed(bits, width[d], share, 7, step=step)) for d, s, bits in before.values()}
    after["BF16"][2][:8] = np.array([0x0000, 0x8000, 0x0000, 0xFFFF], "<u2").view(np.uint8)  # over zero: one step
    target = models.source(after)
    state = digest.measure(target)
    image = Image.create(tmp_path / "image", base, digest.measure(base))
    overlay = image.prepare([models.built(tmp_path, base, target).path], state)
    whole, pieces = image.compared(overlay), image.compared(overlay)
    assert digest.measure(whole).digest == state.digest
    for index, tensor in enumerate(base.inventory.tensors):
        for start in range(0, tensor.nbytes, 24 * tensor.width):
            out = np.empty(min(24 * tensor.width, tensor.nbytes - start), np.uint8)
            pieces.read(index, start, out)
            assert out.tobytes() == models.read(target, index)[start : start + out.size]
    assert whole.unit_steps.tolist() == pieces.unit_steps.tolist() == _expected(base, target)
    assert whole.unit_steps[0] >= 2
