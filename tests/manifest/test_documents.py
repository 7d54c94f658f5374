"""Manifest, head and envelope: exact bytes, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat import canonical
from mailboat.checkpoint.side_files import SideFile
from mailboat.errors import ManifestError
from mailboat.manifest import (
    HEAD_TYPE,
    MANIFEST_TYPE,
    BlobRef,
    Envelope,
    Head,
    Manifest,
    ParentRef,
    PatchRef,
    Signature,
)
from tests.vectors import plain

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "documents.json").read_text("utf-8")
)
KINDS = {"manifest": (Manifest, MANIFEST_TYPE), "head": (Head, HEAD_TYPE)}
MANIFESTS = [case["document"] for case in CASES if case["kind"] == "manifest"]
HEADS = [case["document"] for case in CASES if case["kind"] == "head"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_documents_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    kind, payload_type = KINDS[case["kind"]]
    payload = case["payload"].encode()
    assert plain.canonical(case["document"]) == payload
    document = kind.from_bytes(payload)
    assert document.to_bytes() == payload
    assert hashlib.sha256(payload).hexdigest() == case["sha256"]
    envelope = Envelope.from_json(case["envelope"])
    assert envelope.open(payload_type) == payload
    assert envelope.payload_sha256 == case["sha256"]
    assert [[s.keyid, s.sig.hex()] for s in envelope.signatures] == case["signatures"]
    assert envelope.pae().hex() == case["pae"]
    assert Envelope.wrap(payload_type, payload, envelope.signatures).to_json().decode() == case["envelope"]


def test_a_manifest_reads_back_as_written() -> None:
    blob = BlobRef("0" * 64, 3)
    manifest = Manifest(
        run="12345678-1234-5678-1234-567812345678",
        epoch=2,
        number=9,
        parent=ParentRef(7, "1" * 64),
        inventory=blob,
        digests=blob,
        side_files=(SideFile("a/b.json", 3, "2" * 64), SideFile("z", 0, "3" * 64)),
        state="4" * 64,
        patch=PatchRef((blob, blob), 10),
        elements=10,
        full_bytes=20,
        step=5,
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.sha256 == hashlib.sha256(manifest.to_bytes()).hexdigest()
    assert replace(manifest, step=6).sha256 != manifest.sha256


def _side(path: str, size: int = 0) -> dict[str, Any]:
    return {"path": path, "sha256": "0" * 64, "size": size}


_BAD_MANIFESTS: list[dict[str, Any]] = [
    {"format": "mailboat-manifest-2"},
    {"more": 1},
    {"run": "12345678123456781234567812345678"},
    {"run": 5},
    {"run": "not a run"},
    {"epoch": -1},
    {"epoch": True},
    {"number": "7"},
    {"step": -1},
    {"state": "A" * 64},
    {"state": "a" * 63},
    {"inventory": None},
    {"inventory": {"sha256": "0" * 64}},
    {"digests": {"sha256": "0" * 64, "size": -1}},
    {"digests": {"sha256": "0" * 64, "size": 1, "more": 1}},
    {"parent": {"number": 7, "state": "0" * 64}},
    {"parent": None},
    {"parent": {"number": 1}},
    {"parent": [1]},
    {"patch": {"changed": 1, "parts": []}},
    {"patch": {"changed": 1001, "parts": [{"sha256": "0" * 64, "size": 1}]}},
    {"patch": {"changed": 1, "parts": "x"}},
    {"side_files": {}},
    {"side_files": [_side("b"), _side("a")]},
    {"side_files": [_side("a"), _side("a")]},
    {"side_files": [_side("a"), _side("a/b")]},
    {"side_files": [_side("../a")]},
    {"side_files": [_side("/etc/passwd")]},
    {"side_files": [_side("a//b")]},
    {"side_files": [_side(".hidden")]},
    {"side_files": [_side("a/.git/b")]},
    {"side_files": [_side("model.safetensors")]},
    {"side_files": [_side("model.safetensors.index.json")]},
    {"side_files": [_side("a\0b")]},
    {"side_files": [_side("a" * 256)]},
    {"side_files": [_side("a", (1 << 28) + 1)]},
    {"side_files": [_side("a") | {"more": 1}]},
]


@pytest.mark.parametrize("change", _BAD_MANIFESTS, ids=lambda change: json.dumps(change)[:60])
def test_a_malformed_manifest_is_refused(change: dict[str, Any]) -> None:
    Manifest.from_bytes(plain.canonical(MANIFESTS[1]))
    with pytest.raises(ManifestError, match=r"^The manifest .*\.$"):
        Manifest.from_bytes(plain.canonical(MANIFESTS[1] | change))


@pytest.mark.parametrize(
    "change",
    [{"channel": "Latest"}, {"channel": ""}, {"channel": "a/b"}, {"expires": 1}, {"serial": None}, {"state": "x" * 64}],
    ids=str,
)
def test_a_malformed_head_is_refused(change: dict[str, Any]) -> None:
    Head.from_bytes(plain.canonical(HEADS[0]))
    with pytest.raises(ManifestError, match=r"^The head .*\.$"):
        Head.from_bytes(plain.canonical(HEADS[0] | change))


def test_a_document_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ManifestError):
        Head.from_bytes(plain.canonical(MANIFESTS[0]))
    envelope = Envelope.wrap(MANIFEST_TYPE, b"{}")
    with pytest.raises(ManifestError, match="head"):
        envelope.open(HEAD_TYPE)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1}',
        b'{"a": 1}',
        b'{"a":1}\n',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":1.0}',
        b'{"a":1e3}',
        b'{"a":NaN}',
        b'{"a":-0}',
        b'{"a":01}',
        b'{"a":9223372036854775808}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\\u0041"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b'{"a":"\\/"}',
        b"[" * 100_000,
        b"[" * 20 + b"]" * 20,
        b'{"a":"' + b"x" * 5000 + b'"}',
    ],
    ids=lambda text: repr(text[:24]),
)
def test_json_that_is_not_canonical_is_refused(text: bytes) -> None:
    with pytest.raises(ManifestError):
        canonical.decode(text, what="It", error=ManifestError, max_bytes=4096 if len(text) < 50_000 else 1 << 20)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_VALUES)
def test_canonical_json_equals_the_twin_and_reads_back(value: Any) -> None:
    text = canonical.encode(value)
    assert text == plain.canonical(value)
    assert canonical.decode(text, what="It", error=ManifestError, max_bytes=1 << 20, max_depth=64) == value


@pytest.mark.parametrize(
    "change",
    [
        {"payload": "e30"},
        {"payload": "e31="},
        {"payload": 5},
        {"payload": "e3 0="},
        {"payloadType": ""},
        {"payloadType": "a b"},
        {"payloadType": None},
        {"signatures": None},
        {"signatures": [{"keyid": "a"}]},
        {"signatures": [{"keyid": 1, "sig": ""}]},
        {"signatures": [{"keyid": "a", "sig": "?"}]},
        {"signatures": [{"keyid": "a", "sig": ""}] * 17},
        {"more": 1},
    ],
    ids=str,
)
def test_a_malformed_envelope_is_refused(change: dict[str, Any]) -> None:
    good = {"payload": "e30=", "payloadType": "a/b", "signatures": []}
    assert Envelope.from_dict(good).payload == b"{}"
    with pytest.raises(ManifestError, match=r"^The envelope .*\.$"):
        Envelope.from_json(json.dumps(good | change))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"payload":"","payload":""}', "[" * 100_000], ids=lambda t: t[:20]
)
def test_an_envelope_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Envelope.from_json(text)


@given(st.binary(max_size=50), st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=70)), max_size=3))
def test_envelopes_equal_the_twin(payload: bytes, signatures: list[tuple[str, bytes]]) -> None:
    envelope = Envelope.wrap("a/b", payload, [Signature(*pair) for pair in signatures])
    assert (envelope.to_json(), envelope.pae()) == plain.envelope("a/b", payload, signatures)
    assert Envelope.from_json(envelope.to_json()) == envelope
