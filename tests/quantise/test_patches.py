"""Quantised states as patches: exact after many steps, units whole, and never larger than the field's way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure
from mailboat.patch.apply import apply_patch
from mailboat.patch.build import build_patch
from mailboat.patch.container import PatchFile
from mailboat.quantise import FORMATS
from mailboat.quantise.source import QuantisedSource
from tests.quantise.models import masters, source, step, tensor

SIDE = {"config.json": b'{"model_type": "llama"}'}


def at(steps: int, format: str, share: float = 0.01) -> QuantisedSource:
    weights = masters()
    for number in range(steps):
        weights = step(weights, number, share)
    return QuantisedSource(source(weights, SIDE), format)


def follow(tmp_path: Path, states: list[QuantisedSource]) -> tuple[Checkpoint, list[Path]]:
    """Write the first state, then apply patches built between neighbours; the last checkpoint and the patches."""
    write_checkpoint(states[0], tmp_path / "v0")
    held, patches = Checkpoint.open(tmp_path / "v0"), []
    for number, (before, after) in enumerate(pairwise(states), 1):
        patches.append(tmp_path / f"{number}.mbp")
        build_patch(before, after, patches[-1])
        apply_patch(held, [patches[-1]], tmp_path / f"v{number}")
        held.close()
        held = Checkpoint.open(tmp_path / f"v{number}")
    return held, patches


def byte_xor(before: QuantisedSource, after: QuantisedSource) -> int:
    """Size of the XOR of all bytes under zstd level 1: what shipped systems send."""
    mixed = b"".join((tensor(before, t.name) ^ tensor(after, t.name)).tobytes() for t in before.inventory.tensors)
    return len(zstd.compress(mixed, level=1))


@pytest.mark.parametrize("format", ["fp8-block", "fp8-channel"])
def test_a32_three_patches_in_a_row_equal_a_fresh_quantisation(tmp_path: Path, format: str) -> None:
    held, _ = follow(tmp_path, [at(number, format) for number in range(4)])
    with held:
        write_checkpoint(at(3, format), tmp_path / "fresh")
        with Checkpoint.open(tmp_path / "fresh") as fresh:
            assert measure(held).digest == measure(fresh).digest
            assert (tmp_path / "v3/model.safetensors").read_bytes() == (
                tmp_path / "fresh/model.safetensors"
            ).read_bytes()


@pytest.mark.parametrize("format", ["fp8-block", "nvfp4", "mxfp4", "int4"])
def test_a32_codes_and_scales_are_one_unit(format: str) -> None:
    quantised = at(0, format)
    units: dict[str, set[str]] = {}
    for described in quantised.inventory.tensors:
        if described.unit is not None:
            units.setdefault(described.unit, set()).add(described.name.removeprefix(described.unit))
    assert set(units) == {name.removesuffix(".weight") for name in quantised.scheme.weights}
    assert len({frozenset(members) for members in units.values()}) == 1


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a33_packed_codes_are_exact_and_not_coded_worse_than_byte_xor(tmp_path: Path, format: str) -> None:
    states = [at(number, format) for number in range(4)]
    held, patches = follow(tmp_path, states)
    with held:
        for described in states[3].inventory.tensors:
            np.testing.assert_array_equal(tensor(held, described.name), tensor(states[3], described.name))
    for before, after, patch in zip(states, states[1:], patches, strict=False):
        payload = patch.stat().st_size - header_bytes(patch)
        assert payload <= byte_xor(before, after)


def header_bytes(patch: Path) -> int:
    """What a patch costs before anything changes: digests and counts, the same for any model."""
    return 8 + int.from_bytes(patch.read_bytes()[:8], "little")


@pytest.mark.parametrize("format", FORMATS)
def test_a31_a_dense_step_falls_back_by_tensor_and_stays_exact(tmp_path: Path, format: str) -> None:
    first, dense = at(0, format), QuantisedSource(source(masters(seed=9), SIDE), format)
    held, patches = follow(tmp_path, [first, dense])
    with held, PatchFile.open(patches[0]) as patch:
        assert set(patch.codecs) & {"dense", "xor"}
        for described in dense.inventory.tensors:
            np.testing.assert_array_equal(tensor(held, described.name), tensor(dense, described.name))
    assert patches[0].stat().st_size < 1.05 * dense.inventory.full_bytes + 4096


def test_a_step_of_bf16_weights_moves_few_codes() -> None:
    """Scales come from BF16 weights and rarely move, so a small step stays a small patch."""
    before, after = at(3, "fp8-block", share=0.002), at(4, "fp8-block", share=0.002)
    changed = sum(
        int(np.count_nonzero(tensor(before, t.name) != tensor(after, t.name))) for t in before.inventory.tensors
    )
    assert 0 < changed < 0.02 * before.inventory.full_bytes
