"""Writing: the same bytes back, all or nothing, and never over what is read."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mailboat.checkpoint import replace
from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure
from mailboat.errors import CheckpointError, DigestMismatch, DiskFull, InventoryMismatch
from tests.checkpoint.build import Tensors, folder, safetensors

FIRST: Tensors = {"a": ("U8", [3], b"abc"), "model.embed_tokens.weight": ("BF16", [2, 1], b"wxyz")}
SECOND: Tensors = {"c": ("F32", [], b"\0\0\0\x80"), "lm_head.weight": ("BF16", [2, 1], b"wxyz"), "e": ("U8", [0], b"")}
SIDE = {"config.json": b'{"tie_word_embeddings":true}', "sub/deep/x.txt": b"x"}


def _content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return folder(tmp_path / "sharded", {"m-1.safetensors": FIRST, "m-2.safetensors": SECOND}, side=SIDE)


def _source(first: bytes = b"abc", side: dict[str, bytes] | None = None) -> ArraySource:
    arrays = {
        "a": np.frombuffer(first, np.uint8),
        "model.embed_tokens.weight": np.frombuffer(b"wxyz", np.uint16).reshape(2, 1),
        "c": np.float32(-0.0).reshape(()),
        "e": np.zeros(0, np.uint8),
    }
    return ArraySource(arrays, dtypes={"model.embed_tokens.weight": "BF16"}, side_files=SIDE if side is None else side)


def test_a_copy_in_its_own_layout_is_byte_for_byte(sharded: Path, tmp_path: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        write_checkpoint(checkpoint, tmp_path / "out", layout=checkpoint.layout)
        write_checkpoint(checkpoint, tmp_path / "out", layout=checkpoint.layout, expect=measure(checkpoint))
    assert _content(tmp_path / "out") == _content(sharded)
    assert _names(tmp_path) == ["out", "sharded"]


def test_a27_another_source_fills_the_layout_with_its_aliases(sharded: Path, tmp_path: Path) -> None:
    source = _source()
    with Checkpoint.open(sharded) as checkpoint:
        assert source.inventory.digest == checkpoint.inventory.digest
        write_checkpoint(source, tmp_path / "out", layout=checkpoint.layout)
    assert _content(tmp_path / "out") == _content(sharded)


def test_the_canonical_layout_keeps_the_state_and_loads_elsewhere(sharded: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    with Checkpoint.open(sharded) as checkpoint:
        state = measure(checkpoint)
        write_checkpoint(checkpoint, tmp_path / "out", expect=state)
    with Checkpoint.open(tmp_path / "out") as written:
        assert measure(written).digest == state.digest
        assert [shard.name for shard in written.shards] == ["model.safetensors"]
        assert len(written.shards[0].header.raw) % 8 == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as loaded:
        assert set(loaded.keys()) == {"a", "c", "e", "model.embed_tokens.weight"}
        assert loaded.metadata() == {"format": "pt"}


def test_a_lone_file_is_written_as_one(tmp_path: Path) -> None:
    source = _source(side={})
    write_checkpoint(source, tmp_path / "out.safetensors")
    (tmp_path / "lone.safetensors").write_bytes(safetensors(FIRST, {"k": "v"}))
    with Checkpoint.open(tmp_path / "lone.safetensors") as lone:
        write_checkpoint(lone, tmp_path / "out.safetensors", layout=lone.layout)
        assert _content(tmp_path / "out.safetensors") == _content(lone.path)
        only = ArraySource(
            {"a": np.zeros(3, np.uint8), "model.embed_tokens.weight": np.zeros((2, 1), np.uint16)},
            dtypes={"model.embed_tokens.weight": "BF16"},
            side_files={"x": b"y"},
        )
        write_checkpoint(only, tmp_path / "with side files", layout=lone.layout)
        with pytest.raises(CheckpointError, match="side files"):
            write_checkpoint(only, tmp_path / "new.safetensors", layout=lone.layout)
    assert sorted(_content(tmp_path / "with side files")) == ["model.safetensors", "x"]


def test_files_and_folders_replace_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for side in ({}, {"x": b"1"}, {"x": b"2", "y": b"2"}):
        write_checkpoint(_source(side=side), out)
        assert sorted(_content(out)) == sorted([*side, "model.safetensors"])
    out_file = tmp_path / "m.safetensors"
    out_file.mkdir()
    write_checkpoint(_source(side={}), out_file)
    assert out_file.is_file()
    assert _names(tmp_path) == ["m.safetensors", "out"]


def test_what_is_read_is_never_written(sharded: Path, tmp_path: Path) -> None:
    before = _content(sharded)
    (tmp_path / "link").symlink_to(sharded)
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in filter(Path.is_file, sharded.iterdir()):
        (cache / file.name).symlink_to(file)
    inside = (sharded / "new", sharded / "sub" / "new")
    files = (sharded / "m-1.safetensors", sharded / "config.json")
    for path, refused in ((sharded, inside), (tmp_path / "link", inside), (cache, (cache / "new",))):
        with Checkpoint.open(path) as checkpoint:
            for out in (path, sharded, tmp_path, *files, *refused):
                for source in (checkpoint, _source()):
                    with pytest.raises(CheckpointError):
                        write_checkpoint(source, out, layout=checkpoint.layout)
    assert _content(sharded) == before


@pytest.mark.parametrize("stray", ["thesis.txt", "notes/thesis.txt", ".git/config", "other.safetensors", "link"])
def test_a_folder_with_somebodys_files_beside_a_model_is_not_replaced(tmp_path: Path, stray: str) -> None:
    out = tmp_path / "out"
    write_checkpoint(_source(side={"config.json": b"{}"}), out)
    path = out / stray
    path.parent.mkdir(exist_ok=True)
    if stray == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_text("years of work")
    with pytest.raises(CheckpointError, match="choose another place"):
        write_checkpoint(_source(side={"config.json": b"{}"}), out)
    assert os.path.lexists(path)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        write_checkpoint(_source(), tmp_path / "home")
    with pytest.raises(CheckpointError, match="does not exist"):
        write_checkpoint(_source(), tmp_path / "absent" / "out")


def test_a25_tensors_that_do_not_fit_the_layout_are_named(sharded: Path, tmp_path: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        for source, name in (
            (_source(b"abcd"), "a"),
            (ArraySource({"a": np.zeros(3, np.uint8)}), "c"),
            (ArraySource({**{f"x{i}": np.zeros(1) for i in range(3)}}), "x0"),
        ):
            with pytest.raises(InventoryMismatch) as caught:
                write_checkpoint(source, tmp_path / "out", layout=checkpoint.layout)
            assert name in caught.value.names
    assert not (tmp_path / "out").exists()


def test_unexpected_bytes_are_never_put_in_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_checkpoint(_source(), out)
    before = _content(out)
    for other in (_source(b"abd"), _source(side={**SIDE, "sub/deep/x.txt": b"y"})):
        with pytest.raises(DigestMismatch):
            write_checkpoint(other, out, expect=measure(_source()))
    assert _content(out) == before
    assert _names(tmp_path) == ["out"]


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_old_checkpoint_and_gives_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    out = tmp_path / "out"
    write_checkpoint(_source(), out)
    before = _content(out)

    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        expected = CheckpointError if code == errno.EIO else DiskFull
        with pytest.raises(expected):
            write_checkpoint(_source(b"new"), out)
    assert _content(out) == before
    assert _names(tmp_path) == ["out"]


def test_a22_without_exchange_the_old_one_is_moved_aside_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_checkpoint(_source(), out)

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(replace, "exchange", unknown)
    write_checkpoint(_source(b"new"), out)
    with Checkpoint.open(out) as checkpoint:
        assert measure(checkpoint).digest == measure(_source(b"new")).digest
    before = _content(out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == out and (self / "marker").exists() is False and "old" not in seen:
            seen.append("old")
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    seen: list[str] = []
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError):
        write_checkpoint(_source(b"abd"), out)
    assert _content(out) == before
    assert _names(tmp_path) == ["out"]


def test_a22_names_are_exchanged_in_one_step(tmp_path: Path) -> None:
    if not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("this C library has no renameat2")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"file")
    replace.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"file"
    assert (tmp_path / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        replace.exchange(tmp_path / "a", tmp_path / "absent")


def test_a_source_that_changes_while_it_is_copied_is_not_put_in_place(sharded: Path, tmp_path: Path) -> None:
    with Checkpoint.open(sharded) as checkpoint:
        (sharded / "m-1.safetensors").write_bytes(safetensors(FIRST, {"other": "metadata"}))
        with pytest.raises(CheckpointError):
            write_checkpoint(checkpoint, tmp_path / "out", layout=checkpoint.layout)
    assert _names(tmp_path) == ["sharded"]
