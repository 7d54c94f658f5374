"""Merged and reversed patches are the very bytes of a direct build."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.commands.patch import command
from mailboat.digest import measure
from mailboat.errors import DigestMismatch, PatchError, WrongBase
from mailboat.image import Image
from mailboat.patch import PartSpec, build_patch, encoder, merge_patches, reverse_patch
from mailboat.patch import chain as chain_module
from mailboat.patch import format as format_module
from mailboat.patch import table as table_module
from mailboat.patch.derive import patches_of
from tests.patch.models import changed, random_bits, source, written
from tests.patch.test_contextual import stepped, weights
from tests.patch.test_hostile import put_together, taken_apart
from tests.patch.test_round_trip import WIDTHS


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
        merged = merge_patches(base, [[step] for step in steps], tmp_path / "merged", threads=2)
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
        assert merge_patches(base, [[there], [back]], tmp_path / "none").changed == 0


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_merged_patch_is_the_direct_one_whatever_parts_and_encodings_its_steps_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, data: st.DataObject
) -> None:
    """Windows are cut small, and steps cut them in different places: so they lean on each other in every way."""
    for module in (encoder, table_module, chain_module):
        monkeypatch.setattr(module, "GROUP_BYTES", 1 << 14)
    for module in (format_module, table_module):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1 << 10)
    names = [f"t{i}" for i in range(5)]
    dtypes = {name: data.draw(st.sampled_from(["BF16", "F8_E4M3", "F32", "I64", "U8"])) for name in names}
    sizes = {name: data.draw(st.integers(0, 6000)) for name in names}
    bits = {name: random_bits(dtypes[name], (sizes[name],), i) for i, name in enumerate(names)}
    states = [bits]
    for seed in range(data.draw(st.integers(1, 4))):
        share, step = data.draw(st.sampled_from([(0.0, 1), (0.01, 1), (0.1, 2), (0.3, 0), (1.0, 0)]))
        held = states[-1] if data.draw(st.integers(0, 3)) else states[0]
        states.append({
            name: changed(held[name], WIDTHS[dtypes[name]], share, 7 * seed + i, step=step)
            if data.draw(st.booleans()) else held[name]
            for i, name in enumerate(names)
        })  # fmt: skip
    sources = [source({n: (dtypes[n], (sizes[n],), content[n]) for n in names}) for content in states]
    steps = []
    for number, (before, after) in enumerate(pairwise(sources)):
        owners = [data.draw(st.integers(0, 2)) for _ in before.inventory.tensors]
        specs = [PartSpec(p, 3, tuple(i for i, owner in enumerate(owners) if owner == p)) for p in range(3)]
        for spec in specs if data.draw(st.booleans()) else [None]:
            path = tmp_path / f"{number}-{spec.index if spec else 0}"
            build_patch(before, after, path, part=spec, encode_for=data.draw(st.sampled_from(["size", "speed"])))
            steps.append(path)
    build_patch(sources[0], sources[-1], tmp_path / "direct")
    merged = merge_patches(sources[0], patches_of(steps), tmp_path / "merged", threads=threads)
    assert merged.path.read_bytes() == (tmp_path / "direct").read_bytes()


def test_an_image_and_its_proven_state_are_a_base_too(tmp_path: Path, chain: list[Path]) -> None:
    """As a worker merges: the base's digests are known, the target's are compared, and one part is written."""
    steps = [between(a, b, tmp_path / f"{i}.mbp") for i, (a, b) in enumerate(pairwise(chain))]
    direct = between(chain[0], chain[-1], tmp_path / "direct")
    with Checkpoint.open(chain[0]) as base, Checkpoint.open(chain[-1]) as end, Checkpoint.open(chain[1]) as other:
        goal, wrong = measure(end), measure(other)
        image = Image.create(tmp_path / "image", base, measure(base))
    with image:
        patches = [[step] for step in steps]
        merged = merge_patches(image, patches, tmp_path / "merged", base_state=image.state, target=goal)
        assert merged.path.read_bytes() == direct.read_bytes()
        assert (merged.target_state.sums == goal.sums).all()
        with pytest.raises(DigestMismatch):
            merge_patches(image, patches, tmp_path / "merged", base_state=image.state, target=wrong)
        with pytest.raises(DigestMismatch):
            forged = replace(goal, sums=wrong.sums)
            merge_patches(image, patches, tmp_path / "merged", base_state=image.state, target=forged)
        with pytest.raises(WrongBase):
            merge_patches(image, patches, tmp_path / "merged", base_state=wrong, target=goal)
    assert merged.path.read_bytes() == direct.read_bytes(), "what stood there before a refusal still stands"


def test_what_stood_there_stays_when_a_patch_lies(tmp_path: Path, chain: list[Path]) -> None:
    """A patch whose header promises another state than it leads to."""
    step = between(chain[0], chain[1], tmp_path / "step")
    metadata, entries = taken_apart(step.read_bytes())
    step.write_bytes(put_together(metadata | {"to": "0" * 64}, entries))
    (tmp_path / "out").write_bytes(b"old")
    with Checkpoint.open(chain[0]) as base:
        with pytest.raises(DigestMismatch):
            merge_patches(base, [[step]], tmp_path / "out")
        with pytest.raises(DigestMismatch):
            reverse_patch(base, [step], tmp_path / "out")
    with Checkpoint.open(chain[1]) as base, pytest.raises(WrongBase):
        reverse_patch(base, [step], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_gaps_and_wrong_bases_are_refused(tmp_path: Path, chain: list[Path]) -> None:
    first, third = between(chain[0], chain[1], tmp_path / "1"), between(chain[2], chain[3], tmp_path / "3")
    with Checkpoint.open(chain[0]) as base:
        for patches in ([third], [first, third]):
            with pytest.raises(WrongBase):
                merge_patches(base, [[patch] for patch in patches], tmp_path / "out")
        with pytest.raises(PatchError):
            merge_patches(base, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
