"""Checkpoint folders: shards, index, side files, tied tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint import side_files
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.errors import CheckpointChanged, CheckpointError
from tests.checkpoint.build import Tensors, folder, safetensors

INDEX = "model.safetensors.index.json"
FIRST: Tensors = {"a": ("U8", [3], b"abc"), "b": ("BF16", [2, 1], b"wxyz")}
SECOND: Tensors = {"c": ("F32", [], b"\0\0\0\x80")}
SHARDS = {"model-00001-of-00002.safetensors": FIRST, "model-00002-of-00002.safetensors": SECOND}


def _digest(path: Path) -> str:
    with Checkpoint.open(path) as checkpoint:
        return measure(checkpoint).digest


def test_shards_do_not_change_the_state(tmp_path: Path) -> None:
    sharded = folder(tmp_path / "sharded", SHARDS, side={"config.json": b"{}"})
    single = folder(tmp_path / "single", {"any.safetensors": FIRST | SECOND}, side={"config.json": b"{}"}, index=False)
    assert _digest(sharded) == _digest(single)
    with Checkpoint.open(sharded) as checkpoint:
        assert checkpoint.index_bytes == (sharded / INDEX).read_bytes()
        assert [shard.name for shard in checkpoint.shards] == sorted(SHARDS)
        assert [tensor.name for tensor in checkpoint.inventory.tensors] == ["a", "b", "c"]
        out = np.empty(4, np.uint8)
        checkpoint.read(2, 0, out)
        assert out.tobytes() == b"\0\0\0\x80"


def test_a_lone_file_has_another_state_than_its_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"model.safetensors": FIRST}, side={"config.json": b"{}"}, index=False)
    assert _digest(path) != _digest(path / "model.safetensors")
    (path / "config.json").unlink()
    assert _digest(path) == _digest(path / "model.safetensors")


def _break(path: Path, how: str) -> None:
    index = json.loads((path / INDEX).read_text())
    names: dict[str, Any] = index["weight_map"]
    last = path / "model-00002-of-00002.safetensors"
    match how:
        case "shard missing":
            last.unlink()
        case "tensor missing":
            names["d"] = last.name
        case "tensor extra":
            del names["b"]
        case "tensor in another shard":
            names["a"] = last.name
        case "whole shard not named":
            names["a"] = names["b"] = last.name
        case "shard elsewhere":
            names["c"] = "../model-00002-of-00002.safetensors"
        case "absolute shard":
            names["c"] = str(last)
        case "hidden shard":
            names["c"] = ".model.safetensors"
        case "shard of another kind":
            names["c"] = "config.json"
        case "shard is a number":
            names["c"] = 2
        case "no weight_map":
            del index["weight_map"]
        case "empty weight_map":
            index["weight_map"] = {}
        case "weight_map is a list":
            index["weight_map"] = ["a"]
        case "same tensor in two shards":
            last.write_bytes(safetensors({"a": FIRST["a"]} | SECOND))
        case "second index":
            (path / "other.safetensors.index.json").write_text("{}")
        case "unnamed model.safetensors":
            (path / "model.safetensors").write_bytes(safetensors(FIRST))
    (path / INDEX).write_text(json.dumps(index))
    if how == "index is no JSON":
        (path / INDEX).write_text("{")
    if how == "index is an array":
        (path / INDEX).write_text("[]")
    if how == "duplicate name":
        text = json.dumps(index).replace('"weight_map": {', '"weight_map": {"a": "model-00001-of-00002.safetensors", ')
        (path / INDEX).write_text(text)


_BROKEN = [
    "shard missing", "tensor missing", "tensor extra", "tensor in another shard", "whole shard not named",
    "shard elsewhere", "absolute shard", "hidden shard", "shard of another kind", "shard is a number", "no weight_map",
    "empty weight_map", "weight_map is a list", "same tensor in two shards", "second index",
    "unnamed model.safetensors",
    "index is no JSON", "index is an array", "duplicate name",
]  # fmt: skip


@pytest.mark.parametrize("how", _BROKEN)
def test_a21_a_partial_or_unclear_shard_list_is_refused(tmp_path: Path, how: str) -> None:
    path = folder(tmp_path / "c", SHARDS, side={"config.json": b"{}"})
    assert _digest(path)
    _break(path, how)
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoint.open(path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no index"):
        Checkpoint.open(folder(tmp_path / "c", SHARDS, index=False))
    with pytest.raises(CheckpointError, match="holds no"):
        Checkpoint.open(folder(tmp_path / "empty", {}, index=False))


def test_other_tensor_files_beside_an_index_are_ignored(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", SHARDS)
    before = _digest(path)
    (path / "consolidated.safetensors").write_bytes(b"not even valid")
    assert _digest(path) == before


def test_side_files_are_found_as_the_words_say(tmp_path: Path) -> None:
    side = {
        "config.json": b"{}", "tokenizer.json": b"[]", "1_Pooling/config.json": b"{}", "größe.txt": b"",
        ".hidden": b"x", ".cache/file": b"x", "sub/.hidden": b"x", "sub/adapter.safetensors": b"x",
        "sub/x.safetensors.index.json": b"x",
    }  # fmt: skip
    path = folder(tmp_path / "c", {"model.safetensors": FIRST}, side=side, index=False)
    (tmp_path / "blob").write_bytes(b"linked")
    (path / "linked.txt").symlink_to(tmp_path / "blob")
    os.mkfifo(path / "pipe")
    with Checkpoint.open(path) as checkpoint:
        found = {file.path: checkpoint.read_side(file.path) for file in checkpoint.side_files}
        assert [file.path for file in checkpoint.side_files] == sorted(found)
    assert found == {
        "config.json": b"{}", "tokenizer.json": b"[]", "1_Pooling/config.json": b"{}", "größe.txt": b"",
        "linked.txt": b"linked",
    }  # fmt: skip


def test_a_hugging_face_cache_of_links_is_read(tmp_path: Path) -> None:
    real = folder(tmp_path / "real", SHARDS, side={"config.json": b"{}"})
    cache = tmp_path / "snapshots" / "abc"
    cache.mkdir(parents=True)
    for file in real.iterdir():
        (cache / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(cache)
    assert _digest(tmp_path / "link") == _digest(real)


def test_links_to_folders_or_nothing_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"model.safetensors": FIRST}, index=False)
    for target in (tmp_path, "nothing"):
        (path / "odd").symlink_to(target)
        with pytest.raises(CheckpointError, match="odd is a link"):
            Checkpoint.open(path)
        (path / "odd").unlink()


def test_a_large_side_file_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"model.safetensors": FIRST}, index=False)
    with (path / "optimizer.pt").open("wb") as file:
        file.truncate(side_files.MAX_SIDE_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt has 256 MiB"):
        Checkpoint.open(path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"model.safetensors": FIRST}, index=False)
    Path(os.fsdecode(os.fsencode(path) + b"/\xff")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="rename"):
        Checkpoint.open(path)


@pytest.mark.parametrize("how", ["side file", "new side file", "lost side file", "index", "shard"])
def test_a_folder_that_changes_while_it_is_read_is_an_error(tmp_path: Path, how: str) -> None:
    path = folder(tmp_path / "c", SHARDS, side={"config.json": b"{}", "x": b"1"})
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check_unchanged()
        match how:
            case "side file":
                (path / "x").write_bytes(b"22")
            case "new side file":
                (path / "y").write_bytes(b"")
            case "lost side file":
                (path / "x").unlink()
            case "index":
                (path / INDEX).write_text("{}")
            case "shard":
                (path / "model-00002-of-00002.safetensors").write_bytes(safetensors(FIRST))
        with pytest.raises(CheckpointChanged):
            measure(checkpoint)


EMBEDDING: Tensors = {"model.embed_tokens.weight": ("BF16", [2, 2], b"12345678")}
TIED = {"config.json": b'{"tie_word_embeddings": true}'}


def test_a27_a_tied_head_absent_or_present_is_the_same_state(tmp_path: Path) -> None:
    head: Tensors = {"lm_head.weight": EMBEDDING["model.embed_tokens.weight"]}
    absent = folder(tmp_path / "absent", {"model.safetensors": EMBEDDING}, side=TIED, index=False)
    present = folder(tmp_path / "present", {"model.safetensors": head | EMBEDDING}, side=TIED, index=False)
    assert _digest(absent) == _digest(present)
    with Checkpoint.open(present) as checkpoint:
        assert checkpoint.inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert len(checkpoint.inventory.tensors) == 1


@pytest.mark.parametrize(
    "head", [("BF16", [2, 2], b"12345679"), ("F16", [2, 2], b"12345678"), ("BF16", [4, 1], b"12345678")], ids=str
)
def test_a26_a_tied_head_with_other_bits_is_refused(tmp_path: Path, head: tuple[str, list[int], bytes]) -> None:
    path = folder(tmp_path / "c", {"model.safetensors": EMBEDDING | {"lm_head.weight": head}}, side=TIED, index=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight"):
        Checkpoint.open(path)


def test_equal_bytes_alone_tie_nothing(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"lm_head.weight": EMBEDDING["model.embed_tokens.weight"]}
    with Checkpoint.open(folder(tmp_path / "c", {"model.safetensors": tensors}, index=False)) as checkpoint:
        assert checkpoint.inventory.aliases == {}
        assert len(checkpoint.inventory.tensors) == 2
