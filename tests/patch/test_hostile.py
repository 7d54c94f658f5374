"""A54: hostile and damaged patches give a typed error in bounded time and memory, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import State, measure
from mailboat.errors import MailboatError, PatchError, UnknownCodec
from mailboat.image import Image
from mailboat.patch import PatchFile, apply_patch, build_patch, inspect
from mailboat.patch.streams import compress_table, zstd
from mailboat.patch.table import STREAMS
from tests.patch.models import built, changed, random_bits, source, written

NAMES = ("table", "positions", "values", "literals", "dense")
Header = dict[str, Any]


class Pair:
    """A base on disk, a valid patch from it, and the states at both ends."""

    def __init__(self, folder: Path) -> None:
        before = {
            "a": ("BF16", (64, 64), random_bits("BF16", (64, 64), 1)),
            "b": ("F32", (50, 3), random_bits("F32", (50, 3), 2)),
            "c": ("U8", (7,), random_bits("U8", (7,), 3)),
        }
        after = {
            "a": ("BF16", (64, 64), changed(changed(before["a"][2], 2, 0.03, 4), 2, 0.003, 5, step=0)),
            "b": ("F32", (50, 3), random_bits("F32", (50, 3), 6)),
            "c": before["c"],
        }
        self.base = source(before, {"x.txt": b"1", "gone.txt": b""})
        self.target = source(after, {"x.txt": b"2"})
        self.path = written(folder, "base", self.base)
        patch = build_patch(self.base, self.target, folder / "patch", encode_for="speed")
        self.raw = patch.path.read_bytes()
        self.base_state, self.target_state = patch.base_state, patch.target_state


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def image(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image.create(tmp_path_factory.mktemp("image") / "image", pair.base, pair.base_state)


def taken_apart(raw: bytes) -> tuple[Header, dict[str, bytes]]:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    return header["__metadata__"], {
        name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"
    }


def put_together(metadata: Header, entries: dict[str, bytes], *, text: Callable[[bytes], bytes] = lambda t: t) -> bytes:
    document: Header = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, data in entries.items():
        document[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = text(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(entries.values())


def with_table(raw: bytes, change: Callable[[bytearray], None], **metadata: str) -> bytes:
    """The patch with its raw table changed."""
    found, entries = taken_apart(raw)
    table = bytearray(zstd.decompress(entries["table"]))
    change(table)
    entries["table"] = compress_table(bytes(table))
    return put_together(found | {"table_bytes": str(len(table))} | metadata, entries)


TENSOR_COLUMNS = {"skipped": 4, "elements": 8, "row_elements": 8, "width": 1, "is_changed": 1}
BLOCK_COLUMNS = {"encoding": 1, "block_changed": 4, "slack": 4, "literals": 4}
TENSORS, BLOCKS = 3, 2


def edited(column: str, at: int, value: int) -> Callable[[bytearray], None]:
    """Changes one number of one column, where it stands in the file."""

    def change(table: bytearray) -> None:
        start = 16
        sizes = [(n, w, TENSORS) for n, w in TENSOR_COLUMNS.items()] + [
            (n, w, BLOCKS) for n, w in BLOCK_COLUMNS.items()
        ]
        sizes += [(f"chunks of {stream}", 4, 1) for stream in STREAMS]
        for name, width, count in sizes:
            if name == column:
                for plane, byte in enumerate(value.to_bytes(width, "little")):
                    table[start + plane * count + at] = byte
                return
            start += width * count

    return change


def refused(pair: Pair, image: Image, raw: bytes, folder: Path) -> MailboatError:
    """The error of every way in; nothing may be written by any."""
    patch = folder / "hostile"
    patch.write_bytes(raw)
    with Checkpoint.open(pair.path) as base, pytest.raises(MailboatError) as applied:
        apply_patch(base, [patch], folder / "out")
    with pytest.raises(MailboatError):
        image.prepare([patch], pair.target_state, scratch=folder)
    assert [path.name for path in folder.iterdir()] == ["hostile"]
    image.verify_sums()
    assert image.digest == pair.base_state.digest
    return applied.value


def test_the_valid_patch_is_accepted(pair: Pair, image: Image, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    assert put_together(metadata, entries) == pair.raw
    assert with_table(pair.raw, lambda _: None) == pair.raw
    (tmp_path / "p").write_bytes(pair.raw)
    image.prepare([tmp_path / "p"], pair.target_state, scratch=tmp_path).close()
    assert set(NAMES) <= set(entries), "the hostile variants below need every stream"


TABLE_EDITS = {
    "index skipped": edited("skipped", 0, 1),
    "index beyond the inventory": edited("skipped", 2, 1),
    "index that wraps": edited("skipped", 1, 2**32 - 1),
    "elements beyond the shape": edited("elements", 0, 8192),
    "elements huge": edited("elements", 0, 2**63),
    "elements of very many blocks": edited("elements", 0, 2**61),
    "row of another shape": edited("row_elements", 0, 32),
    "row zero": edited("row_elements", 0, 0),
    "row that does not divide": edited("row_elements", 0, 63),
    "width of three": edited("width", 0, 3),
    "width of another dtype": edited("width", 2, 2),
    "flag of two": edited("is_changed", 0, 2),
    "changed without blocks": edited("is_changed", 2, 1),
    "blocks without a flag": edited("is_changed", 0, 0),
    "encoding unknown": edited("encoding", 0, 9),
    "encoding same but changed": edited("encoding", 0, 0),
    "encoding unlike the codecs": edited("encoding", 1, 1),
    "block changed beyond its elements": edited("block_changed", 0, 5000),
    "block changed off by one": edited("block_changed", 0, 3),
    "block changed never": edited("block_changed", 0, 0),
    "slack one more": edited("slack", 0, 1),
    "slack huge": edited("slack", 0, 2**32 - 1),
    "slack for planes": edited("slack", 1, 1),
    "literals huge": edited("literals", 0, 2**32 - 1),
    "literals for planes": edited("literals", 1, 1),
}


def test_a54_a_tensor_marked_but_unchanged(pair: Pair, image: Image, tmp_path: Path) -> None:
    def change(table: bytearray) -> None:
        edited("encoding", 0, 0)(table)
        edited("block_changed", 0, 0)(table)
        edited("slack", 0, 0)(table)
        edited("literals", 0, 0)(table)

    refused(pair, image, with_table(pair.raw, change), tmp_path)


@pytest.mark.parametrize("name", sorted(TABLE_EDITS))
def test_a54_a_table_that_lies(pair: Pair, image: Image, tmp_path: Path, name: str) -> None:
    error = refused(pair, image, with_table(pair.raw, TABLE_EDITS[name]), tmp_path)
    assert isinstance(error, PatchError), error


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("size", [0, 1, 2**32 - 1])
def test_a54_chunk_sizes_that_lie(pair: Pair, image: Image, tmp_path: Path, stream: str, size: int) -> None:
    refused(pair, image, with_table(pair.raw, edited(f"chunks of {stream}", 0, size)), tmp_path)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [0, 2, 2**32 - 1])
def test_a54_counts_that_lie(pair: Pair, image: Image, tmp_path: Path, place: int, count: int) -> None:
    def change(table: bytearray) -> None:
        table[4 * place : 4 * place + 4] = count.to_bytes(4, "little")

    refused(pair, image, with_table(pair.raw, change), tmp_path)


@pytest.mark.parametrize("change", [lambda t: t.append(0), lambda t: t.pop(), lambda t: t.clear()])
def test_a54_a_table_cut_or_grown(
    pair: Pair, image: Image, tmp_path: Path, change: Callable[[bytearray], None]
) -> None:
    refused(pair, image, with_table(pair.raw, change), tmp_path)


METADATA_EDITS = {
    "format": ("format", "mailboat-patch-2"),
    "from malformed": ("from", "A" * 64),
    "to of another state": ("to", "0" * 64),
    "inventory of another model": ("inventory", "0" * 64),
    "number with a zero": ("parts", "01"),
    "negative number": ("changed", "-1"),
    "number too long": ("changed", "9" * 30),
    "changed that does not add up": ("changed", "1"),
    "elements of another model": ("elements", "123456789"),
    "full bytes of another model": ("full_bytes", "1"),
    "part beyond parts": ("part", "1"),
    "a part is missing": ("parts", "2"),
    "too many parts": ("parts", "99999999"),
    "too many tensors": ("tensors", "4294967296"),
    "fewer tensors": ("tensors", "2"),
    "a tensor without an owner": ("tensors", "4"),
    "table bomb": ("table_bytes", str(1 << 40)),
    "table size wrong": ("table_bytes", "100"),
    "zstd": ("zstd", "latest; rm"),
    "codecs unsorted": ("codecs", "xor,positional"),
    "codecs twice": ("codecs", "positional,positional"),
    "codec not used": ("codecs", "dense,positional,xor"),
    "codecs not named": ("codecs", "positional"),
    "removed not canonical": ("removed", '[ "gone.txt"]'),
    "removed not a list": ("removed", '{"a":1}'),
    "removed not text": ("removed", "[1]"),
    "removed not there": ("removed", '["nowhere.txt"]'),
    "removed escapes": ("removed", '["../gone.txt"]'),
    "removed and carried": ("removed", '["x.txt"]'),
}


@pytest.mark.parametrize("name", sorted(METADATA_EDITS))
def test_a54_metadata_that_lies(pair: Pair, image: Image, tmp_path: Path, name: str) -> None:
    key, value = METADATA_EDITS[name]
    metadata, entries = taken_apart(pair.raw)
    refused(pair, image, put_together(metadata | {key: value}, entries), tmp_path)


def test_unknown_codecs_are_refused_by_name(pair: Pair, image: Image, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    raw = put_together(metadata | {"codecs": "fractal,positional,xor"}, entries)
    error = refused(pair, image, raw, tmp_path)
    assert isinstance(error, UnknownCodec)
    assert "fractal" in str(error)
    error = refused(pair, image, with_table(pair.raw, edited("encoding", 0, 5)), tmp_path)
    assert isinstance(error, UnknownCodec)
    assert "number 5" in str(error)


@pytest.mark.parametrize("key", ["from", "removed", "zstd"])
def test_a54_metadata_missing(pair: Pair, image: Image, tmp_path: Path, key: str) -> None:
    metadata, entries = taken_apart(pair.raw)
    del metadata[key]
    refused(pair, image, put_together(metadata, entries), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        lambda t: t.replace(b'"U8"', b'"I8"', 1),
        lambda t: t.replace(b'"U8"', b'"BF16"', 1),
        lambda t: t.replace(b"{", b"{ ", 1),
        lambda t: t.replace(b'"table":{', b'"table":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"table":{', 1),
        lambda t: t.replace(b'"shape":[', b'"shape":[1,', 1),
        lambda t: t.replace(b'"shape":[', b'"shape":[-', 1),
        lambda t: t.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1),
        lambda t: t.replace(b'"table"', b'"tables"', 1),
        lambda t: t[:-1] + b',"extra":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        lambda t: b"[" * 200_000,
        lambda t: b'{"__metadata__":' * 100_000,
        lambda t: b"null",
        lambda t: b"\xff" * 64,
        lambda t: b'{"__metadata__":{"format":"mailboat-patch-1\\ud800"}}',
        lambda t: (
            b'{"__metadata__":{"format":"mailboat-patch-1"},"table":{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}"
        ),
        lambda t: t.replace(b'"__metadata__":{', b'"__metadata__":{"a":"\\ud800",', 1),
    ],
)
def test_a54_headers(pair: Pair, image: Image, tmp_path: Path, text: Callable[[bytes], bytes]) -> None:
    metadata, entries = taken_apart(pair.raw)
    error = refused(pair, image, put_together(metadata, entries, text=text), tmp_path)
    assert isinstance(error, PatchError)


@pytest.mark.parametrize("length", [0, 7, 2**22 + 8, 2**40, 2**64 - 8])
def test_a54_header_lengths(pair: Pair, image: Image, tmp_path: Path, length: int) -> None:
    refused(pair, image, length.to_bytes(8, "little") + pair.raw[8:], tmp_path)


@pytest.mark.parametrize("path", ["../x.txt", "/x.txt", ".x", "a//b", "m.safetensors", "a/../b", "", "a\0b", "n" * 300])
def test_a54_side_paths(pair: Pair, image: Image, tmp_path: Path, path: str) -> None:
    metadata, entries = taken_apart(pair.raw)
    entries["side:" + path] = entries.pop("side:x.txt")
    refused(pair, image, put_together(metadata, entries), tmp_path)


def test_a54_side_files_unsorted_or_nested(pair: Pair, image: Image, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    for extra in ("a.txt", "x.txt/y"):
        refused(pair, image, put_together(metadata, entries | {"side:" + extra: b""}), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a54_streams_cut_grown_or_replaced(pair: Pair, image: Image, tmp_path: Path, name: str) -> None:
    metadata, entries = taken_apart(pair.raw)
    data = entries[name]
    for other in (
        data[:-1],
        data + b"\0",
        b"\0" * len(data),
        b"\xff" * len(data),
        data[:-1] + bytes([data[-1] ^ 0xFF]),
    ):
        refused(pair, image, put_together(metadata, entries | {name: other}), tmp_path)
    refused(pair, image, put_together(metadata, {n: d for n, d in entries.items() if n != name}), tmp_path)


def test_a54_a_table_that_explodes(pair: Pair, image: Image, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    bomb = zstd.compress(bytes(1 << 26), level=3)
    assert len(bomb) < 10_000
    for size in (1 << 26, len(pair.raw), 1 << 20):
        raw = put_together(metadata | {"table_bytes": str(size)}, entries | {"table": bomb})
        assert isinstance(refused(pair, image, raw, tmp_path), PatchError)


def test_a54_two_frames_where_one_is_due(pair: Pair, image: Image, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    table = entries["table"] + zstd.compress(b"")
    refused(pair, image, put_together(metadata, entries | {"table": table}), tmp_path)


def test_a54_a_forged_result_is_found(pair: Pair, image: Image, tmp_path: Path) -> None:
    """A well-formed patch to other bytes under the right names: strong digests refuse it, and so do sums."""
    other = source(
        {
            "a": ("BF16", (64, 64), random_bits("BF16", (64, 64), 77)),
            "b": ("F32", (50, 3), random_bits("F32", (50, 3), 78)),
            "c": ("U8", (7,), random_bits("U8", (7,), 3)),
        },
        {"x.txt": b"2"},
    )
    forged = built(tmp_path, pair.base, other, "hostile").path.read_bytes()
    metadata, entries = taken_apart(forged)
    refused(pair, image, put_together(metadata | {"to": pair.target_state.digest}, entries), tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a54_any_mutation_is_refused_or_harmless(pair: Pair, image: Image, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(pair.raw)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        at = data.draw(st.integers(0, len(raw) - 1)) if raw else 0
        if kind == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at:]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        elif raw:
            del raw[at : at + data.draw(st.integers(1, 20))]
    # A few bits carry nothing (the zstd version, spare bits of its frames): then the result has to be right.
    patch, out = tmp_path / "mutated", tmp_path / "out"
    patch.write_bytes(raw)
    with Checkpoint.open(pair.path) as base:
        try:
            assert apply_patch(base, [patch], out) == pair.target_state.digest
        except MailboatError:
            assert not out.exists()
        else:
            with Checkpoint.open(out) as after:
                assert measure(after).digest == pair.target_state.digest
            shutil.rmtree(out)
    try:
        image.prepare([patch], pair.target_state, scratch=tmp_path).close()
    except MailboatError:
        assert image.digest == pair.base_state.digest
    assert [path.name for path in tmp_path.iterdir()] == ["mutated"]


def test_inspect_refuses_the_same(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(with_table(pair.raw, edited("width", 0, 3)))
    with pytest.raises(PatchError):
        inspect([tmp_path / "p"])
    with pytest.raises(PatchError, match="can't be opened"):
        PatchFile.open(tmp_path / "nowhere")


def test_states_are_what_they_say(pair: Pair) -> None:
    assert isinstance(pair.base, ArraySource)
    assert measure(pair.target).digest == pair.target_state.digest
    assert isinstance(pair.target_state, State)
