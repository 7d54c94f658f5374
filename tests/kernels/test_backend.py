"""The backend on a device gives the CPU's files byte for byte, and is found through one function."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from mailboat import compiled
from mailboat.checkpoint.source import ArraySource, TensorSource
from mailboat.errors import DeviceUnavailable, PatchError
from mailboat.image import Image
from mailboat.patch import PatchFile, blocks
from mailboat.patch.backends import gpu_kernels, kernels
from mailboat.patch.build import build_patch
from mailboat.patch.classes import classes_of
from mailboat.patch.decode import Decoder
from mailboat.patch.parts import Parts
from mailboat.patch.scratch import Scratch
from mailboat.quantise import FORMATS
from mailboat.quantise.source import QuantisedSource
from tests.kernels.conftest import WANTED
from tests.quantise.models import tensor

ROOT = Path(__file__).resolve().parents[2]
DEVICE = {"interpreter": "interpreter", "gpu": "cuda"}[WANTED]


Described = Sequence[tuple[str, str, Any, tuple[int, ...], float]]


def states() -> tuple[ArraySource, ArraySource]:
    """BF16, FP8, FP32 and I64 with odd rows; sparse, dense and no changes."""
    return drawn([
        ("a.weight", "BF16", np.uint16, (67, 131), 0.01), ("b.weight", "F8_E4M3", np.uint8, (33, 57), 0.3),
        ("c.weight", "F32", np.uint32, (5, 9), 1.0), ("d.bias", "BF16", np.uint16, (3,), 0.5),
        ("e.ids", "I64", np.uint64, (40,), 0.2), ("f.weight", "BF16", np.uint16, (30, 30), 0.0),
    ])  # fmt: skip


def sparse() -> tuple[ArraySource, ArraySource]:
    """Positional blocks of several widths and orders: some can be in a run, and two lie beside each other there."""
    return drawn([
        ("a", "BF16", np.uint16, (67, 13), 0.03), ("b", "BF16", np.uint16, (16, 24), 0.04),
        ("c", "BF16", np.uint16, (8, 40), 0.05), ("d", "I16", np.uint16, (8, 12), 0.05),
        ("e", "F8_E4M3", np.uint8, (8, 32), 0.04), ("f", "F32", np.uint32, (10, 8), 0.05),
    ])  # fmt: skip


def drawn(tensors: Described) -> tuple[ArraySource, ArraySource]:
    """(name, dtype, dtype of the bits, shape, share of changes): a state and the next one."""
    generator = np.random.default_rng(0)
    old, new, dtypes = {}, {}, {}
    for name, kind, dtype, shape, density in tensors:
        before = generator.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
        after = before + (generator.random(shape) < density).astype(dtype) * generator.integers(1, 5, shape).astype(
            dtype
        )
        old[name], new[name], dtypes[name] = before, after, kind
    return ArraySource(old, dtypes=dtypes), ArraySource(new, dtypes=dtypes)


@pytest.mark.parametrize("encode_for", ["size", "speed"])
def test_patches_are_byte_for_byte_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode_for: Literal["size", "speed"]
) -> None:
    base, target = states()
    here = build_patch(base, target, tmp_path / "cpu.mbp", encode_for=encode_for)
    monkeypatch.setenv("MAILBOAT_DEVICE", DEVICE)
    there = build_patch(base, target, tmp_path / "device.mbp", threads=2, encode_for=encode_for)
    assert (tmp_path / "cpu.mbp").read_bytes() == (tmp_path / "device.mbp").read_bytes()
    assert there.sha256 == hashlib.sha256((tmp_path / "cpu.mbp").read_bytes()).hexdigest()
    np.testing.assert_array_equal(there.base_state.sums, here.base_state.sums)
    np.testing.assert_array_equal(there.target_state.sums, here.target_state.sums)


def test_an_image_advances_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = states()
    built = build_patch(base, target, tmp_path / "patch.mbp")
    monkeypatch.setenv("MAILBOAT_DEVICE", DEVICE)
    image = Image.create(tmp_path / "image", base, built.base_state)
    overlay = image.prepare([tmp_path / "patch.mbp"], built.target_state)
    image.commit(overlay)
    assert image.digest == built.target_state.digest
    image.verify_sums()


def every_block(patch: Path, base: TensorSource) -> dict[tuple[int, int], tuple[bytes, ...]]:
    """What a patch does to each block."""
    with ExitStack() as stack:
        decoder = Decoder(Parts.open([patch], base.inventory, stack), base, 2)
        return {
            (block.index, block.start): tuple(
                np.asarray(part).tobytes() for part in (block.positions, block.new, block.change)
            )
            for block in decoder.all(stack)
        }


def test_positional_blocks_are_decoded_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a base in memory, where they come in runs, and from one on disk, where they come alone."""
    base, target = sparse()
    built = build_patch(base, target, tmp_path / "patch.mbp", encode_for="speed")
    expected = every_block(tmp_path / "patch.mbp", base)
    with PatchFile.open(tmp_path / "patch.mbp") as patch:
        assert patch.codecs == ("positional",)
    monkeypatch.setenv("MAILBOAT_DEVICE", DEVICE)
    monkeypatch.setattr(gpu_kernels("arrays"), "_AT_ONCE", 800)  # two blocks of those in a run
    monkeypatch.setattr(compiled, "decode_positional", None)
    assert every_block(tmp_path / "patch.mbp", base) == expected
    with Image.create(tmp_path / "image", base, built.base_state) as image:
        assert every_block(tmp_path / "patch.mbp", image) == expected


def test_a_damaged_block_is_refused_on_the_device_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = sparse()
    build_patch(base, target, tmp_path / "patch.mbp", encode_for="speed")
    sound = (tmp_path / "patch.mbp").read_bytes()
    said = []
    for device in ("cpu", DEVICE):
        monkeypatch.setenv("MAILBOAT_DEVICE", device)
        for place in (-40, -8):
            damaged = bytearray(sound)
            damaged[place] ^= 0xFF
            (tmp_path / "damaged").write_bytes(damaged)
            try:
                said.append((device, place, every_block(tmp_path / "damaged", base)))
            except PatchError as error:
                said.append((device, place, str(error)))
    half = len(said) // 2
    assert [told[1:] for told in said[:half]] == [told[1:] for told in said[half:]]
    assert any(isinstance(told[2], str) for told in said)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "F64", "I8"])
@pytest.mark.parametrize(("elements", "density"), [(1000, 0.02), (40 * 1001, 0.003), (1000, 0.6), (64, 0.0)])
def test_two_blocks_are_compared_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, elements: int, density: float
) -> None:
    """Positions, new elements, counts by class, sums: of few changes all, of many the positions."""
    width = {"BF16": 2, "F32": 4, "F64": 8}.get(dtype, 1)
    generator = np.random.default_rng(elements)
    old, new = (np.zeros(-(-elements * width // 8), np.uint64) for _ in range(2))
    held, after = (words.view(np.uint8)[: elements * width].view(f"u{width}") for words in (old, new))
    held[:] = generator.integers(0, np.iinfo(held.dtype).max, elements, dtype=held.dtype, endpoint=True)
    after[:] = held ^ (generator.random(elements) < density)
    monkeypatch.setattr(compiled, "sampling", lambda _elements: 3)  # as in a larger block
    results = []
    for device in ("cpu", DEVICE):
        monkeypatch.setenv("MAILBOAT_DEVICE", device)
        scratch = Scratch()
        found = blocks.compare(
            scratch, old, new, None, elements=elements, width=width, piece=(elements // 8 * width, 3, 5),
            seed=(np.uint64(1 << 63), np.uint64(9)), classes=classes_of(dtype),
        )  # fmt: skip
        few = found.few, found.elements.tobytes(), found.counts.tobytes()
        results.append((found.positions.tobytes(), found.delta.tobytes(), few if found.few else found.few))
    assert results[0] == results[1]


@pytest.mark.parametrize("format", FORMATS)
def test_checkpoints_are_quantised_on_the_device_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    rows = 9 if format == "fp8-channel" else 130  # a program for each row, or for each 128
    finite = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    arrays = {
        "a.weight": np.random.default_rng(1).normal(size=(rows, 192)).astype(np.float32),
        "b.weight": finite[: rows * 192 : 3].reshape(rows, 64).copy(),
    }
    monkeypatch.setattr("mailboat.quantise.source._STRIPE", 1 << 14)
    here, there = (QuantisedSource(ArraySource(arrays), format) for _ in range(2))
    assert len(here.scheme.weights) == 2
    expected = [tensor(here, described.name) for described in here.inventory.tensors]
    monkeypatch.setenv("MAILBOAT_DEVICE", DEVICE)
    for described, bits in zip(there.inventory.tensors, expected, strict=True):
        np.testing.assert_array_equal(tensor(there, described.name), bits)


def test_the_cpu_serves_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAILBOAT_DEVICE", raising=False)
    assert kernels() is compiled
    monkeypatch.setenv("MAILBOAT_DEVICE", "cpu")
    assert kernels() is compiled


@pytest.mark.parametrize(("device", "says"), [("tpu", "choose cpu, cuda"), ("cuda:99", "no CUDA device")])
def test_a_device_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    monkeypatch.setenv("MAILBOAT_DEVICE", device)
    with pytest.raises(DeviceUnavailable, match=says):
        kernels()


def test_foreign_kernels_are_never_taken(tmp_path: Path) -> None:
    """There is a public package of that name; standing first on the path it must not be mistaken for ours."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("raise SystemExit('foreign')")
    (tmp_path / "mailboat").symlink_to(ROOT / "mailboat")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from mailboat.patch import backends\n"
        "backends._PACKED = 'mailboat._absent'\n"
        "print(backends._package())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert shown.stdout.strip() == "None", shown.stderr
