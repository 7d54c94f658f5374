"""Reading single files: everything valid works, everything else is one typed error in little time and memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.header import parse_header
from mailboat.checkpoint.inventory import DTYPE_BITS
from mailboat.digest import measure
from mailboat.errors import CheckpointChanged, CheckpointError
from tests.checkpoint.build import Tensors, entry, raw_file, safetensors
from tests.vectors import plain


def _read(checkpoint: Checkpoint, name: str) -> bytes:
    index = checkpoint.inventory.index(name)
    out = np.empty(checkpoint.inventory.tensors[index].nbytes, np.uint8)
    checkpoint.read(index, 0, out)
    return out.tobytes()


def test_a29_every_dtype_scalar_empty_and_unaligned_data(tmp_path: Path) -> None:
    tensors: Tensors = {"first": ("U8", [3], b"abc")}  # everything after it is unaligned
    for dtype, bits in DTYPE_BITS.items():
        tensors[f"{dtype} matrix"] = (dtype, [3, 8], os.urandom(3 * bits))
        tensors[f"{dtype} empty"] = (dtype, [0, 2**40], b"")
    tensors["scalar"] = ("F32", [], os.urandom(4))
    tensors["norm.weight"] = ("BF16", [7], os.urandom(14))
    tensors["unknown"] = ("MX9", [5, 2], os.urandom(11))
    tensors[""] = ("U8", [1], b"n")
    path = tmp_path / "odd.safetensors"
    path.write_bytes(safetensors(tensors, {"format": "pt"}))
    with Checkpoint.open(path) as checkpoint:
        assert not checkpoint.is_folder
        assert checkpoint.side_files == ()
        assert {tensor.name for tensor in checkpoint.inventory.tensors} == set(tensors)
        for name, (_, _, content) in tensors.items():
            assert _read(checkpoint, name) == content
        ordered = [tensors[tensor.name][2] for tensor in checkpoint.inventory.tensors]
        assert measure(checkpoint).digest == plain.state(checkpoint.inventory.to_bytes(), ordered, {})[2]


def test_a28_all_bf16_patterns_survive(tmp_path: Path) -> None:
    patterns = np.arange(2**16, dtype=np.uint16).tobytes()
    path = tmp_path / "patterns.safetensors"
    path.write_bytes(safetensors({"w": ("BF16", [2**16], patterns)}))
    with Checkpoint.open(path) as checkpoint:
        assert _read(checkpoint, "w") == patterns


def test_the_state_does_not_depend_on_order_or_metadata(tmp_path: Path) -> None:
    tensors: Tensors = {"a": ("U8", [3], b"abc"), "b": ("BF16", [2], b"wxyz")}
    digests = set()
    for number, (order, metadata) in enumerate((("ab", None), ("ba", None), ("ab", {"step": "5"}))):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(safetensors({name: tensors[name] for name in order}, metadata))
        with Checkpoint.open(path) as checkpoint:
            digests.add(measure(checkpoint).digest)
    assert len(digests) == 1


@pytest.mark.parametrize(("dtype", "shape"), [("BF16", [2**16, 2**16]), ("U8", [2**32 + 9]), ("F8_E4M3", [3, 2**30])])
def test_a29_tensors_beyond_4_gib_and_2_31_elements_are_read(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    elements = int(np.prod(shape, dtype=np.uint64))
    nbytes = elements * DTYPE_BITS[dtype] // 8
    header = raw_file({"first": entry("U8", [1], 0, 1), "huge": entry(dtype, shape, 1, 1 + nbytes)})
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:  # a file of holes
        file.write(header)
        file.seek(len(header) + 1 + nbytes - 8)
        file.write(b"the end.")
    with Checkpoint.open(path) as checkpoint:
        index = checkpoint.inventory.index("huge")
        tensor = checkpoint.inventory.tensors[index]
        assert (tensor.nbytes, tensor.elements, tensor.shape) == (nbytes, elements, tuple(shape))
        out = np.empty(9, np.uint8)
        checkpoint.read(index, nbytes - 9, out)
        assert out.tobytes() == b"\0the end."
        checkpoint.read(index, 0, out)
        assert not out.any()
        with pytest.raises(ValueError, match="beyond"):
            checkpoint.read(index, nbytes - 8, out)


def test_a59_many_tensors_open_within_bounded_memory(tmp_path: Path) -> None:
    count = 20_000
    path = tmp_path / "many.safetensors"
    path.write_bytes(safetensors({f"model.layers.{i}.weight": ("U8", [2], b"ab") for i in range(count)}))
    tracemalloc.start()
    with Checkpoint.open(path) as checkpoint:
        assert len(checkpoint.inventory.tensors) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count * 4096


def test_a59_a_terabyte_of_holes_opens_by_its_headers(tmp_path: Path) -> None:
    """16 shards of 64 GiB that take no room on the disk: nothing but headers and what is asked for is read."""
    shards, size = 16, 1 << 36
    weight_map = {f"layers.{number:02}.weight": f"model-{number:02}.safetensors" for number in range(shards)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for tensor, name in weight_map.items():
        with (tmp_path / name).open("wb") as file:
            file.write(raw_file({tensor: entry("BF16", [1 << 15, 1 << 20], 0, size)}))
            file.truncate(file.tell() + size)
            file.seek(-8, os.SEEK_END)
            file.write(b"the end.")
    tracemalloc.start()
    with Checkpoint.open(tmp_path) as checkpoint:
        inventory = checkpoint.inventory
        assert inventory.full_bytes == 1 << 40
        out = np.empty(8, np.uint8)
        for index in range(shards):
            checkpoint.read(index, size - 8, out)
            assert out.tobytes() == b"the end."
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20 and len(inventory.to_bytes()) < 2000


_ONE = {"a": entry("U8", [4], 0, 4)}
_HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"\1\0\0\0\0\0\0",
    "no header": (0).to_bytes(8, "little"),
    "header beyond the file": raw_file(_ONE, b"abcd", length=10_000),
    "header of 2^63 bytes": raw_file(_ONE, b"abcd", length=2**63),
    "header of 2^64 - 1 bytes": raw_file(_ONE, b"abcd", length=2**64 - 1),
    "header cut short": raw_file(_ONE, b"abcd", length=20),
    "not JSON": raw_file(b"{'a': 1}"),
    "text after the object": raw_file(b"{} x"),
    "not an object": raw_file(b"[]"),
    "leading space": raw_file(b" {}"),
    "byte order mark": raw_file(b"\xef\xbb\xbf{}"),
    "bad UTF-8": raw_file(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "overlong UTF-8": raw_file(b'{"\xc0\xae":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "lone surrogate": raw_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "lone surrogate in a dtype": raw_file(b'{"a":{"dtype":"\\ud800","shape":[0],"data_offsets":[0,0]}}'),
    "duplicate tensor": raw_file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "duplicate after escapes": raw_file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "duplicate field": raw_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "duplicate metadata key": raw_file(b'{"__metadata__":{"a":"1","a":"2"}}'),
    "duplicate metadata": raw_file(b'{"__metadata__":{},"__metadata__":{}}'),
    "metadata with a number": raw_file({"__metadata__": {"a": 1}}),
    "metadata with a list": raw_file({"__metadata__": {"a": []}}),
    "metadata is a text": raw_file({"__metadata__": "x"}),
    "metadata is a tensor": raw_file({"__metadata__": entry("U8", [1], 0, 1)}, b"x"),
    "metadata is null": raw_file({"__metadata__": None}),
    "unknown field": raw_file({"a": entry("U8", [1], 0, 1) | {"more": 1}}, b"x"),
    "missing field": raw_file({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "tensor is a text": raw_file({"a": "x"}),
    "tensor is a list": raw_file({"a": ["U8", [1], [0, 1]]}),
    "tensor is null": raw_file({"a": None}),
    "tensor of texts": raw_file({"a": {"dtype": "U8", "shape": "1", "data_offsets": "0"}}),
    "dtype is a number": raw_file({"a": entry("U8", [1], 0, 1) | {"dtype": 8}}, b"x"),
    "dtype is empty": raw_file({"a": entry("", [1], 0, 1)}, b"x"),
    "dtype of a megabyte": raw_file({"a": entry("U" * 1_000_000, [1], 0, 1)}, b"x"),
    "negative size": raw_file({"a": entry("U8", [-1], 0, 1)}, b"x"),
    "sizes that multiply to one": raw_file({"a": entry("U8", [-1, -1], 0, 1)}, b"x"),
    "size is a float": raw_file({"a": entry("U8", [1.0], 0, 1)}, b"x"),
    "size is true": raw_file({"a": entry("U8", [True], 0, 1)}, b"x"),
    "size is NaN": raw_file({"a": entry("U8", [float("nan")], 0, 1)}, b"x"),
    "size beyond 64 bits": raw_file({"a": entry("U8", [2**64 + 1], 0, 1)}, b"x"),
    "shape overflows": raw_file({"a": entry("U8", [2**33, 2**33], 0, 0)}),
    "shape wraps to the right size": raw_file({"a": entry("U8", [2**32, 2**32 + 1], 0, 2**32)}),
    "shape of a million large sizes": raw_file({"a": entry("U8", [2**60] * 1_000_000, 0, 1)}, b"x"),
    "shape is an object": raw_file({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, b"x"),
    "offsets negative": raw_file({"a": entry("U8", [1], -1, 0)}, b"x"),
    "offsets reversed": raw_file({"a": entry("U8", [1], 1, 0)}, b"x"),
    "one offset": raw_file({"a": entry("U8", [1], 0, 1) | {"data_offsets": [1]}}, b"x"),
    "three offsets": raw_file({"a": entry("U8", [1], 0, 1) | {"data_offsets": [0, 1, 1]}}, b"x"),
    "offset is a text": raw_file({"a": entry("U8", [1], "0", 1)}, b"x"),
    "offset is a float": raw_file({"a": entry("U8", [1], 0.0, 1)}, b"x"),
    "offset of 5,000 digits": raw_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,' + b"1" * 5000 + b"]}}"),
    "offsets beyond the file": raw_file({"a": entry("U8", [9], 0, 9)}, b"x"),
    "offsets beyond 2^63": raw_file({"a": entry("U8", [1], 2**63 - 1, 2**63)}, b"x"),
    "range too long": raw_file({"a": entry("U8", [1], 0, 2)}, b"xy"),
    "range too short": raw_file({"a": entry("BF16", [2], 0, 2)}, b"xy"),
    "half a byte": raw_file({"a": entry("F4", [3], 0, 1)}, b"x"),
    "overlap": raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xyz"),
    "twice the same range": raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"xy"),
    "empty tensor inside another": raw_file({"a": entry("U8", [2], 0, 2), "b": entry("U8", [0], 1, 1)}, b"xy"),
    "hole": raw_file({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xyz"),
    "hole at the start": raw_file({"a": entry("U8", [1], 1, 2)}, b"xy"),
    "bytes after the last tensor": raw_file({"a": entry("U8", [1], 0, 1)}, b"xy"),
    "bytes without tensors": raw_file({}, b"x"),
    "data cut short": raw_file(_ONE, b"abc"),
    "deep arrays": raw_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep objects": raw_file(b'{"a":' * 100_000),
    "many empty objects": raw_file(b"{" + b",".join(b'"%d":{}' % i for i in range(300_000)) + b"}"),
    "many empty arrays": raw_file(
        b'{"a":{"dtype":"U8","shape":[' + b",".join([b"[]"] * 300_000) + b'],"data_offsets":[0,0]}}'
    ),
}  # fmt: skip


@pytest.mark.parametrize("content", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_a54_hostile_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sentence = str(caught.value)
    assert str(path) in sentence
    assert sentence.endswith(".")
    assert len(sentence) < 700
    assert peak < 20 * len(content) + 1_000_000
    assert len(list(Path("/proc/self/fd").iterdir())) < 200  # nothing stays open


def test_a54_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="100000001"):
        Checkpoint.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a54_damage_at_any_place_never_escapes_as_another_error(data: st.DataObject) -> None:
    good = bytearray(safetensors({"a": ("BF16", [2, 2], b"12345678"), "b": ("F32", [], b"abcd")}, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(8, len(good) - 1))] = data.draw(st.integers(0, 255))
    length = int.from_bytes(good[:8], "little")
    try:
        header = parse_header(bytes(good[: 8 + length]), len(good), "it")
    except CheckpointError:
        return
    assert header.data_bytes == 12


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors({"a": ("U8", [5000], bytes(5000))}))
    with Checkpoint.open(path) as checkpoint:
        os.truncate(path, 1000)
        with pytest.raises(CheckpointChanged, match="cut short"):
            measure(checkpoint)


@pytest.mark.parametrize("how", ["rewritten", "replaced", "removed", "grown"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.safetensors"
    content = safetensors({"a": ("U8", [5000], bytes(5000))})
    path.write_bytes(content)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check_unchanged()
        if how == "rewritten":
            path.write_bytes(content[:-1] + b"\1")
            os.utime(path, ns=(1, 1))
        elif how == "replaced":
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(path)
        elif how == "removed":
            path.unlink()
        else:
            with path.open("ab") as file:
                file.write(b"more")
        with pytest.raises(CheckpointChanged, match="try again"):
            measure(checkpoint)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe", "link"):
        if name == "link":
            (tmp_path / name).symlink_to("nothing")
        with pytest.raises(CheckpointError, match=name):
            Checkpoint.open(tmp_path / name)


def test_headers_of_other_writers_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays: dict[str, Any] = {"b": np.arange(5, dtype=np.float16), "a": np.ones((2, 2)), "e": np.zeros((0, 3), np.int8)}
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    with Checkpoint.open(tmp_path / "m.safetensors") as checkpoint:
        for name, array in arrays.items():
            assert _read(checkpoint, name) == array.tobytes()
        header = checkpoint.shards[0].header
        assert json.loads(header.raw[8:])["__metadata__"] == {"format": "np"}
