"""Applying to a checkpoint on disk: one pass, the right base, and nothing written where something is read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mailboat.checkpoint.files import Checkpoint, Shard
from mailboat.checkpoint.source import ArraySource, Bytes
from mailboat.cli import cli
from mailboat.digest import measure
from mailboat.errors import CheckpointError, InventoryMismatch, PatchError, WrongBase
from mailboat.patch import apply_patch, build_patch, inspect
from mailboat.patch.container import PatchFile
from tests.checkpoint.build import folder
from tests.patch.models import built, changed, random_bits, same_bytes, source, written

TIED = b'{"tie_word_embeddings":true}'
QUANTISED = b'{"quantization_config":{"bits":8}}'


def model(seed: int, side_files: dict[str, bytes] | None = None, *, shape: tuple[int, int] = (700, 500)) -> ArraySource:
    """Version `seed` of one model: two tensors that move and one that does not."""
    tensors = {}
    for number, name in enumerate(("model.embed_tokens.weight", "a", "still")):
        bits = random_bits("BF16", shape, number)
        tensors[name] = ("BF16", shape, changed(bits, 2, 0.05, seed + number) if seed and name != "still" else bits)
    return source(tensors, side_files)


def test_the_base_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = model(0), model(1)
    patch = built(tmp_path, base, target)
    taken = 0
    original = Shard.read

    def read(self: Shard, offset: int, out: Bytes) -> None:
        nonlocal taken
        taken += out.size
        original(self, offset, out)

    monkeypatch.setattr(Shard, "read", read)
    with Checkpoint.open(written(tmp_path, "base", base)) as opened:
        assert apply_patch(opened, [patch.path], tmp_path / "out", threads=3) == patch.target_state.digest
    assert taken == base.inventory.full_bytes
    with Checkpoint.open(tmp_path / "out") as result:
        assert same_bytes(result, target)


def test_shards_in_any_order_with_a_tied_head_stored_twice(tmp_path: Path) -> None:
    def shards(bits: bytes, other: bytes) -> dict[str, dict[str, tuple[str, list[int], bytes]]]:
        return {
            "model-00001-of-00002.safetensors": {
                "z": ("BF16", [8, 4], other), "lm_head.weight": ("BF16", [8, 4], bits),
            },
            "model-00002-of-00002.safetensors": {
                "model.embed_tokens.weight": ("BF16", [8, 4], bits), "b": ("U8", [0], b""), "a": ("U8", [], b"7"),
            },
        }  # fmt: skip

    values = [random_bits("BF16", (8, 4), seed).tobytes() for seed in range(4)]
    base = folder(tmp_path / "base", shards(values[0], values[1]), side={"config.json": TIED})
    target = folder(tmp_path / "target", shards(values[2], values[3]), side={"config.json": TIED})
    with Checkpoint.open(base) as before, Checkpoint.open(target) as after:
        build_patch(before, after, tmp_path / "patch")
        apply_patch(before, [tmp_path / "patch"], tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in target.iterdir()
    }


def test_a06_another_base_is_called_so_even_where_the_patch_can_not_be_decoded(tmp_path: Path) -> None:
    old = np.zeros((64, 64), np.uint16)
    new = old.copy()
    new[::2] = 0x4242  # literals: against a base that holds them already they are values that no encoder writes
    arrays = [ArraySource({"t": bits}, dtypes={"t": "BF16"}) for bits in (old, new)]
    patch = built(tmp_path, *arrays)
    with Checkpoint.open(written(tmp_path, "new", arrays[1])) as wrong, pytest.raises(WrongBase, match="starts from"):
        apply_patch(wrong, [patch.path], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "patch"]


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (TIED, b"{}", InventoryMismatch),
        (b"{}", TIED, InventoryMismatch),
        (TIED, None, InventoryMismatch),
        (QUANTISED, b"{}", InventoryMismatch),
        (b"{}", QUANTISED, InventoryMismatch),
        (b"{}", b"{", CheckpointError),
        (TIED, TIED[:-1] + b',"x":1}', None),
        (b'{"x":1}', None, None),
        (None, b'{"x":1}', None),
    ],
)
def test_a27_a_config_that_makes_another_model_is_refused(
    tmp_path: Path, before: bytes | None, after: bytes | None, error: type[Exception] | None
) -> None:
    base = model(0, {"config.json": before} if before else {})
    target = model(1, {"config.json": after} if after and not error else {})
    # The target's inventory is that of the base, whatever its config.json says: as a forger would write it.
    target._inventory = base.inventory
    if error and after:
        target._side, target._side_files = {"config.json": after}, _described(after)
    patch = built(tmp_path, base, target)
    with Checkpoint.open(written(tmp_path, "base", base)) as opened:
        if error is None:
            assert apply_patch(opened, [patch.path], tmp_path / "out") == patch.target_state.digest
        else:
            with pytest.raises(error, match=r"config\.json"):
                apply_patch(opened, [patch.path], tmp_path / "out")
    assert (tmp_path / "out").exists() is (error is None)


def _described(content: bytes) -> tuple[object, ...]:
    from mailboat.checkpoint.side_files import side_file

    return (side_file("config.json", content),)


def test_a_patch_is_never_written_over_what_is_read(tmp_path: Path) -> None:
    base = written(tmp_path, "base", model(0, {"config.json": b"{}"}))
    target = written(tmp_path, "target", model(1, {"config.json": b"{}"}))
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with Checkpoint.open(base) as old, Checkpoint.open(target / "model.safetensors") as new:
        inside = [base / "model.safetensors", base / "new", target / "model.safetensors", tmp_path / "base"]
        elsewhere = [tmp_path / "other", tmp_path / "nowhere" / "patch", tmp_path / "pipe", Path()]
        for out in [*inside, tmp_path / "link" / "model.safetensors", *elsewhere]:
            with pytest.raises((CheckpointError, InventoryMismatch)):
                build_patch(old, new, out)
    with Checkpoint.open(base) as old, Checkpoint.open(target) as new:
        for out in [*inside, tmp_path / "link" / "model.safetensors", *elsewhere]:
            with pytest.raises(CheckpointError, match=r"can't be written|overlaps"):
                build_patch(old, new, out)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


def test_a_result_is_never_written_over_its_patch_or_a_device(tmp_path: Path) -> None:
    patch = built(tmp_path, model(0), model(1))
    lone = written(tmp_path, "base", model(0)) / "model.safetensors"
    os.mkfifo(tmp_path / "pipe")
    content = patch.path.read_bytes()
    for base in (lone, lone.parent):
        with Checkpoint.open(base) as opened:
            for out in (patch.path, tmp_path / "pipe"):
                with pytest.raises(CheckpointError, match="choose another place"):
                    apply_patch(opened, [patch.path], out)
    assert patch.path.read_bytes() == content
    assert (tmp_path / "pipe").is_fifo()


def test_what_is_no_file_is_no_patch(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(PatchError, match="is not a file"):
            PatchFile.open(path)


def test_a_part_given_twice_is_counted_never(tmp_path: Path) -> None:
    patch = built(tmp_path, model(0), model(1))
    with pytest.raises(PatchError, match="once"):
        inspect([patch.path, patch.path])
    assert (
        inspect([patch.path])["totals"]["changed"]
        == patch.changed
        == int(sum(row["changed"] for row in inspect([patch.path], measure(model(0)).inventory)["tensors"]))
    )


@pytest.mark.parametrize("arguments", [["digest", ""], ["patch", "apply", "", "x", "-o", "y"], ["quantise", ""]])
def test_an_empty_path_is_not_the_working_directory(arguments: list[str]) -> None:
    said = CliRunner().invoke(cli, arguments)
    assert said.exit_code == 2
    assert "the path is empty" in said.output
