"""The outline of an inventory: the numbers of the whole, and as strict as the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.canonical import encode
from mailboat.checkpoint import outline
from mailboat.checkpoint.inventory import FORMAT, Inventory, Tensor
from mailboat.checkpoint.outline import Outline
from mailboat.errors import CheckpointError

ROWS: list[Any] = [
    ["target", "a", "BF16", [2, 3], None],
    ["target", 'b],["c"', "F4", [2, 2], "u"],
    ["target", "üz", "weird", [7], None, 9],
    ["target", "ü\U0001f6a4", "F32", [], None],
]


def document(**changes: Any) -> bytes:
    return encode({"aliases": {"z": "a"}, "format": FORMAT, "quantiser": None, "tensors": ROWS} | changes)


def both(data: bytes) -> None:
    """Whole and outline agree, on the numbers or on the refusal."""
    try:
        whole = Inventory.from_bytes(data)
    except CheckpointError:
        with pytest.raises(CheckpointError):
            Outline.of(data)
    else:
        assert Outline.of(data) == Outline(len(whole.tensors), whole.elements, whole.full_bytes)


@pytest.fixture(params=[1 << 20, 1, 7, 64])
def window(request: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(outline, "_WINDOW", request.param)


SOUND = [document(), document(aliases={}), document(tensors=[], aliases={}), document(quantiser="q"),
         document(tensors=ROWS[:1])]  # fmt: skip
UNSOUND = [
    b"", b"{", b"[]", b"null", document()[:-1], document()[:-2], document() + b" ", document() + b"}",
    document().replace(b",", b", ", 1), document().replace(b"[2,3]", b"[2, 3]"),
    document().replace(b"[2,3]", b"[2.0,3]"), document().replace(b"[2,3]", b"[-0,3]"),
    document().replace(b"[2,3]", b"[true,3]"), document().replace(b"[2,3]", b"[" * 5000 + b"]" * 5000),
    document().replace(b"[2,3]", b"[99999999999999999999,3]"), document().replace(b'"a"', b'"\\u0061"'),
    document(format="other"), document(more=1), document(quantiser=4), document(aliases=[]), document(aliases={"z": 1}),
    document(aliases={"z": "gone"}), document(aliases={"a": "a"}), document(aliases={"z": "z"}),
    document(tensors=ROWS[::-1]), document(tensors=[ROWS[0], ROWS[0]]), document(tensors={}), document(tensors=None),
    document(tensors=[ROWS[0][:4]]), document(tensors=[[*ROWS[0], 6]]),
    document(tensors=[["target", "a", "F4", [1], None]]),
    document(tensors=[["target", "a", "BF16", [1 << 62, 4], None]]), document().replace(b'"a"', b'"\xff"'),
    encode({"aliases": {}, "format": FORMAT, "quantiser": None}),
]  # fmt: skip


@pytest.mark.parametrize("data", SOUND)
@pytest.mark.usefixtures("window")
def test_sound_documents(data: bytes) -> None:
    Inventory.from_bytes(data)
    both(data)


@pytest.mark.parametrize("data", UNSOUND)
@pytest.mark.usefixtures("window")
def test_everything_that_the_whole_refuses_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        Inventory.from_bytes(data)
    both(data)


@given(st.data())
def test_a_changed_byte_is_judged_alike(data: st.DataObject) -> None:
    raw = bytearray(document())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    both(bytes(raw))


def test_a_value_that_never_ends_is_not_read_again_and_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(outline, "_WINDOW", 100)
    monkeypatch.setattr(outline, "_LONGEST", 1000)
    with pytest.raises(CheckpointError):
        Outline.of(document(aliases={"z" * 5000: "a"})[:4000])
    with pytest.raises(CheckpointError):
        Outline.of(document(tensors=[["target", "n" * 5000, "BF16", [1], None]], aliases={}))


def test_a59_half_a_million_tensors_need_little_more_than_their_document() -> None:
    import tracemalloc

    inventory = Inventory.of([Tensor("target", f"t{index:06}", "BF16", (8, 4)) for index in range(60_000)], {})
    raw, expected = inventory.to_bytes(), (60_000, inventory.elements, inventory.full_bytes)
    del inventory
    tracemalloc.start()
    try:
        found = Outline.of(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.tensors, found.elements, found.full_bytes) == expected
    assert peak < 16 << 20, "a window's worth, whatever the number"
    assert json.loads(raw)["format"] == FORMAT
