"""The inventory document, rows and widths, declared aliases and units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint.declared import declared_aliases, quantiser_text, units
from mailboat.checkpoint.inventory import DTYPE_BITS, Inventory, Tensor
from mailboat.checkpoint.source import ArraySource
from mailboat.errors import CheckpointError, InventoryMismatch
from tests.vectors import plain

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "inventory.json").read_text("utf-8")
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["title"])
def test_inventories_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    assert plain.inventory(case["tensors"], case["aliases"], case["quantiser"]).decode() == case["document"]
    inventory = Inventory.from_bytes(case["document"].encode())
    assert inventory.to_bytes().decode() == case["document"]
    assert inventory.digest == case["sha256"]
    shuffled = [
        Tensor(c, name, dtype, tuple(shape), unit, *rest)
        for c, name, dtype, shape, unit, *rest in case["tensors"][::-1]
    ]
    assert Inventory.of(shuffled, case["aliases"], case["quantiser"]).digest == case["sha256"]


def _document(rows: list[Any], **change: Any) -> bytes:
    return plain.canonical(
        {"aliases": {}, "format": "mailboat-inventory-1", "quantiser": None, "tensors": rows} | change
    )


_ROW = ["target", "a", "U8", [2], None]


@pytest.mark.parametrize(
    "document",
    [
        _document([_ROW], format="mailboat-inventory-2"),
        _document([_ROW], more=1),
        _document([_ROW, _ROW]),
        _document([["target", "b", "U8", [2], None], _ROW]),
        _document([[*_ROW, 2]]),
        _document([["target", "a", "X9", [2], None]]),
        _document([["target", "a", "X9", [2], None, -1]]),
        _document([["target", "a", "X9", [2], None, True]]),
        _document([["target", "a", "U8", [-2], None]]),
        _document([["target", "a", "U8", [True], None]]),
        _document([["target", "a", "U8", "2", None]]),
        _document([["target", "a", "F64", [2**62, 2**62], None]]),
        _document([["target", "a", "F4", [3], None]]),
        _document([["target", "a", "U8", [2], 5]]),
        _document([["target", 5, "U8", [2], None]]),
        _document([["target", "a"]]),
        _document([5]),
        _document([_ROW], tensors=5),
        _document([_ROW], tensors={"a": 1}),
        _document([_ROW], aliases={"b": "c"}),
        _document([_ROW], aliases={"a": "a"}),
        _document([_ROW], aliases={"b": 1}),
        _document([_ROW], aliases=[]),
        _document([_ROW], quantiser=1),
        b"[]",
        b"null",
        _document([_ROW]) + b" ",
    ],
    ids=lambda document: document[:90].decode(),
)
def test_a_malformed_inventory_is_refused(document: bytes) -> None:
    with pytest.raises(CheckpointError):
        Inventory.from_bytes(document)


@pytest.mark.parametrize(
    ("tensor", "rows", "row_bytes", "width", "elements"),
    [
        (Tensor("target", "t", "BF16", (3, 5)), 3, 10, 2, 15),
        (Tensor("target", "t", "F32", (2, 3, 4)), 6, 16, 4, 24),
        (Tensor("target", "t", "F32", ()), 1, 4, 4, 1),
        (Tensor("target", "t", "F32", (7,)), 1, 28, 4, 7),
        (Tensor("target", "t", "F64", (0, 2**40)), 0, 0, 8, 0),
        (Tensor("target", "t", "F64", (2**40, 2**40, 0)), 0, 0, 8, 0),
        (Tensor("target", "t", "F4", (3, 6)), 3, 3, 1, 9),
        (Tensor("target", "t", "F4", (4, 1)), 1, 2, 1, 2),
        (Tensor("target", "t", "F6_E2M3", (2, 4)), 2, 3, 1, 6),
        (Tensor("target", "t", "X9", (4, 2), None, 21), 1, 21, 1, 21),
        (Tensor("target", "t", "X9", (4, 2), None, 20), 4, 5, 1, 20),
        (Tensor("target", "t", "X9", (0,), None, 5), 1, 5, 1, 5),
        (Tensor("target", "t", "C64", (3, 1)), 3, 8, 8, 3),
    ],
)
def test_a29_geometry_of_odd_shapes(tensor: Tensor, rows: int, row_bytes: int, width: int, elements: int) -> None:
    assert (tensor.rows, tensor.row_bytes, tensor.width, tensor.elements) == (rows, row_bytes, width, elements)
    assert tensor.rows * tensor.row_bytes == tensor.nbytes == tensor.width * tensor.elements


def test_a29_every_dtype_has_a_width_that_divides_its_rows() -> None:
    for dtype in DTYPE_BITS:
        tensor = Tensor("target", "t", dtype, (3, 8))
        assert tensor.row_bytes % tensor.width == 0
        assert tensor.nbytes == 3 * DTYPE_BITS[dtype]


def _tied(**more: Any) -> bytes:
    return json.dumps({"tie_word_embeddings": True, "rope": {"theta": 1e6}} | more).encode()


@pytest.mark.parametrize(
    ("config", "names", "aliases"),
    [
        (_tied(), ["model.embed_tokens.weight"], {"lm_head.weight": "model.embed_tokens.weight"}),
        (_tied(), ["model.embed_tokens.weight", "lm_head.weight"], {"lm_head.weight": "model.embed_tokens.weight"}),
        (
            b'{"text_config":{"tie_word_embeddings":true}}',
            ["transformer.wte.weight"],
            {"lm_head.weight": "transformer.wte.weight"},
        ),
        (_tied(), ["gpt_neox.embed_in.weight"], {"embed_out.weight": "gpt_neox.embed_in.weight"}),
        (_tied(), ["model.embed_tokens.weight", "transformer.wte.weight"], {}),
        (_tied(), ["something.weight"], {}),
        (b'{"tie_word_embeddings":false}', ["model.embed_tokens.weight"], {}),
        (b'{"tie_word_embeddings":1,"text_config":5}', ["model.embed_tokens.weight"], {}),
        (b"{}", ["model.embed_tokens.weight"], {}),
        (None, ["model.embed_tokens.weight"], {}),
    ],
)
def test_a27_tied_heads_are_declared_by_the_config(
    config: bytes | None, names: list[str], aliases: dict[str, str]
) -> None:
    assert declared_aliases(config, names) == aliases


@pytest.mark.parametrize("config", [b"", b"[]", b'{"a":1,"a":2}', b"\xff", b"[" * 100_000])
def test_a_damaged_config_is_refused(config: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        declared_aliases(config, [])


def test_the_quantiser_is_the_config_with_sorted_keys() -> None:
    config = b'{"quantization_config": {"b": [128, 128], "a": 0.5, "\xc3\xa4": null}}'
    assert quantiser_text(config) == '{"a":0.5,"b":[128,128],"\u00e4":null}'
    assert quantiser_text(b"{}") is None
    assert quantiser_text(None) is None


def test_a32_codes_and_scales_are_one_unit() -> None:
    found = units(
        [
            "q.weight", "q.weight_scale_inv", "k.weight", "k.weight_scale", "k.weight_scale_2", "k.input_scale",
            "v.weight_packed", "v.weight_scale", "v.weight_global_scale", "v.weight_shape",
            "experts.down_proj_blocks", "experts.down_proj_scales", "norm.weight", "o.weight_scale", "x_blocks",
        ]
    )  # fmt: skip
    stems: dict[str, set[str]] = {}
    for name, unit in found.items():
        stems.setdefault(unit, set()).add(name.removeprefix(unit))
    assert stems == {
        "q": {".weight", ".weight_scale_inv"},
        "k": {".weight", ".weight_scale", ".weight_scale_2", ".input_scale"},
        "v": {".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_shape"},
        "experts.down_proj": {"_blocks", "_scales"},
    }


def test_a25_differences_are_named() -> None:
    def make(**arrays: np.ndarray) -> Inventory:
        return ArraySource(arrays).inventory

    base = make(a=np.zeros(3, np.uint8), b=np.zeros(3, np.uint8), c=np.zeros(3, np.uint8))
    base.require_same(make(c=np.ones(3, np.uint8), b=np.zeros(3, np.uint8), a=np.zeros(3, np.uint8)))
    with pytest.raises(InventoryMismatch) as caught:
        base.require_same(make(a=np.zeros(3, np.int8), c=np.zeros((3, 1), np.uint8), d=np.zeros(1, np.uint8)))
    assert set(caught.value.names) == {"a", "b", "c", "d"}
    assert "missing: b" in str(caught.value)
    assert "extra: d" in str(caught.value)
    many = make(**{f"t{i}": np.zeros(1, np.uint8) for i in range(9)})
    with pytest.raises(InventoryMismatch, match="t0, t1, t2, t3, t4 and 4 more"):
        many.require_same(make())


def test_differing_aliases_are_named() -> None:
    tensors = [Tensor("target", "a", "U8", (1,))]
    with pytest.raises(InventoryMismatch) as caught:
        Inventory.of(tensors, {"b": "a"}).require_same(Inventory.of(tensors, {}))
    assert caught.value.names == ("b",)


def test_a26_arrays_that_share_storage_are_held_once() -> None:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = ArraySource({"lm_head.weight": shared, "model.embed_tokens.weight": shared, "other": shared.copy()})
    assert [tensor.name for tensor in source.inventory.tensors] == ["model.embed_tokens.weight", "other"]
    assert source.inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert source.inventory.index("lm_head.weight") == source.inventory.index("model.embed_tokens.weight")


def test_a26_differing_replicas_are_refused() -> None:
    arrays = {"a": np.zeros(2, np.float32), "b": np.array([0.0, -0.0], np.float32)}
    with pytest.raises(CheckpointError, match="b and a"):
        ArraySource(arrays, aliases={"b": "a"})
    with pytest.raises(CheckpointError, match="nowhere"):
        ArraySource(arrays, aliases={"b": "nowhere"})


def test_arrays_that_are_not_plain_bits_are_refused() -> None:
    for array in (np.zeros((4, 4), np.uint8)[:, ::2], np.zeros(2, ">u2"), np.array([None]), np.zeros(2, np.complex128)):
        with pytest.raises(CheckpointError, match=r"^w "):
            ArraySource({"w": array})
    with pytest.raises(CheckpointError, match="takes 8"):
        ArraySource({"w": np.zeros(3, np.uint16)}, dtypes={"w": "BF16"}, shapes={"w": (4,)})
    with pytest.raises(CheckpointError, match="side files"):
        ArraySource({}, side_files={"../x": b""})
