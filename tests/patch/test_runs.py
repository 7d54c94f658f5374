"""Blocks of a base in memory are decoded in runs, those of one on disk alone: both give the same."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource, TensorSource
from mailboat.patch import PatchFile, build_patch, runs
from mailboat.patch.decode import Decoder
from mailboat.patch.format import POSITIONAL
from mailboat.patch.parts import Parts
from mailboat.patch.runs import addresses_of, in_runs
from tests.patch.models import changed, random_bits, source, written

# Odd sizes end inside a word, so their blocks are not in a run and lie in the streams between those that are.
TENSORS = [
    ("BF16", (64, 96), 2, 0.02, 3), ("BF16", (77,), 2, 0.03, 3), ("F32", (40, 30), 4, 0.05, 0),
    ("I8", (33,), 1, 0.06, 2), ("U8", (24, 64), 1, 0.02, 0), ("BF16", (2, 1 << 20), 2, 0.0001, 3),
    ("F64", (50,), 8, 0.05, 0), ("F32", (8, 8), 4, 1.0, 0), ("BF16", (5, 7), 2, 0.03, 0),
    ("F16", (128, 24), 2, 0.03, 500), ("BF16", (16, 16), 2, 0.0, 3),
]  # fmt: skip


def pair() -> tuple[ArraySource, ArraySource]:
    """Tensors of many widths with few, many and no changes, steps and literals."""
    old, new = {}, {}
    for number, (dtype, shape, width, share, step) in enumerate(TENSORS):
        before = random_bits(dtype, shape, number)
        old[f"t{number:02}"] = dtype, shape, before
        new[f"t{number:02}"] = dtype, shape, changed(before, width, share, number, step=step)
    return source(old), source(new)


def decoded(patch: Path, base: TensorSource, threads: int) -> dict[tuple[int, int], tuple[bytes, ...]]:
    """What a patch does to each block."""
    found = {}
    with ExitStack() as stack:
        for block in Decoder(Parts.open([patch], base.inventory, stack), base, threads).all(stack):
            assert (block.index, block.start) not in found
            found[block.index, block.start] = tuple(
                np.asarray(part).tobytes() for part in (block.positions, block.new, block.change, block.nbytes)
            )
    return found


@pytest.mark.parametrize("changes", [1, 100, 1 << 14])
def test_runs_and_single_blocks_decode_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
    monkeypatch.setattr(runs, "_CHANGES", changes)
    base, target = pair()
    build_patch(base, target, tmp_path / "patch", encode_for="speed")
    with PatchFile.open(tmp_path / "patch") as patch:
        inside = in_runs(patch.table, addresses_of(base))
        positional = patch.table.encoding == POSITIONAL
        assert 0 < inside.sum() < positional.sum(), "some positional blocks are in runs, and some are not"
    with Checkpoint.open(written(tmp_path, "base", base)) as on_disk:
        assert not addresses_of(on_disk).any()
        alone = decoded(tmp_path / "patch", on_disk, 1)
    assert alone
    for threads in (1, 2):
        assert decoded(tmp_path / "patch", base, threads) == alone
