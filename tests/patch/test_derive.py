"""Merged and reversed patches are the very bytes of a direct build."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.commands.patch import command
from mailboat.errors import PatchError, WrongBase
from mailboat.patch import build_patch, merge_patches, reverse_patch
from tests.patch.models import written
from tests.patch.test_contextual import stepped, weights


def state(bits: np.ndarray, scales: np.ndarray, side: dict[str, bytes]) -> ArraySource:
    """A model of BF16 weights and FP32 scales."""
    return ArraySource({"w": bits.reshape(100, -1), "s": scales}, dtypes={"w": "BF16", "s": "F32"}, side_files=side)


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """Four states; the last one returns some weights to where they began."""
    bits = weights(40_000, 1)
    scales = np.random.default_rng(2).random(1000, np.float32)
    states = [(bits, scales, {"a.txt": b"1", "gone.txt": b""})]
    for seed in (3, 4):
        states.append((stepped(states[-1][0], seed), scales * np.float32(seed), {"a.txt": b"2", "new.txt": b"n"}))
    last = stepped(states[-1][0], 5)
    last[:10_000] = bits[:10_000]
    states.append((last, scales, {"a.txt": b"1", "new.txt": b"m"}))
    return [written(tmp_path, f"v{i}", state(*content)) for i, content in enumerate(states)]


def between(base: Path, target: Path, out: Path) -> Path:
    """The direct patch."""
    with Checkpoint.open(base) as before, Checkpoint.open(target) as after:
        return build_patch(before, after, out).path


def test_a_merged_patch_is_the_direct_one(tmp_path: Path, chain: list[Path]) -> None:
    steps = [between(a, b, tmp_path / f"{i}.mbp") for i, (a, b) in enumerate(pairwise(chain))]
    direct = between(chain[0], chain[-1], tmp_path / "direct")
    with Checkpoint.open(chain[0]) as base:
        merged = merge_patches(base, steps, tmp_path / "merged", threads=2)
    assert merged.path.read_bytes() == direct.read_bytes()
    names = [str(path) for path in (chain[0], *steps)]
    assert CliRunner().invoke(command, ["merge", *names, "-o", str(tmp_path / "cli")]).exit_code == 0
    assert (tmp_path / "cli").read_bytes() == direct.read_bytes()


def test_a_reversed_patch_is_the_direct_one(tmp_path: Path, chain: list[Path]) -> None:
    step = between(chain[0], chain[1], tmp_path / "step")
    direct = between(chain[1], chain[0], tmp_path / "direct")
    with Checkpoint.open(chain[0]) as base:
        assert reverse_patch(base, [step], tmp_path / "back").path.read_bytes() == direct.read_bytes()


def test_merging_there_and_back_gives_the_empty_patch(tmp_path: Path, chain: list[Path]) -> None:
    there, back = between(chain[0], chain[1], tmp_path / "there"), between(chain[1], chain[0], tmp_path / "back")
    with Checkpoint.open(chain[0]) as base:
        assert merge_patches(base, [there, back], tmp_path / "none").changed == 0


def test_gaps_and_wrong_bases_are_refused(tmp_path: Path, chain: list[Path]) -> None:
    first, third = between(chain[0], chain[1], tmp_path / "1"), between(chain[2], chain[3], tmp_path / "3")
    with Checkpoint.open(chain[0]) as base:
        for patches in ([third], [first, third]):
            with pytest.raises(WrongBase):
                merge_patches(base, patches, tmp_path / "out")
        with pytest.raises(PatchError):
            merge_patches(base, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
