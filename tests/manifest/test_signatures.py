"""Signatures count for the exact bytes, the type and the key that they name, and for nothing else."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from mailboat.errors import ManifestError
from mailboat.identity import new_key, public_half
from mailboat.manifest import HEAD_TYPE, MANIFEST_TYPE, Envelope, Signature
from mailboat.signing import (
    HEAD,
    PUBLISHER,
    KeyDocument,
    KeyProblem,
    endorse,
    endorsers,
    read_key,
    read_public,
    sign,
    signers,
    write_key,
)

ONE, TWO = new_key(), new_key()
KEYS = (public_half(ONE), public_half(TWO))


def test_a_signature_is_found_by_its_key_alone() -> None:
    envelope = sign(Envelope.wrap(MANIFEST_TYPE, b"exact"), ONE)
    assert signers(envelope, KEYS) == {KEYS[0]}
    assert signers(envelope, [KEYS[1]]) == frozenset()
    assert signers(sign(envelope, TWO), KEYS) == set(KEYS)
    assert len(sign(envelope, ONE).signatures) == 1


def test_other_bytes_another_type_and_another_name_are_not_signed() -> None:
    made = sign(Envelope.wrap(MANIFEST_TYPE, b"exact"), ONE).signatures
    assert not signers(Envelope(MANIFEST_TYPE, b"exacT", made), KEYS)
    assert not signers(Envelope(HEAD_TYPE, b"exact", made), KEYS)
    claimed = (Signature(KEYS[1], made[0].sig),)
    assert not signers(Envelope(MANIFEST_TYPE, b"exact", claimed), KEYS)
    assert not signers(Envelope(MANIFEST_TYPE, b"exact", (Signature(KEYS[0], b"short"),)), KEYS)


def test_a_key_file_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "trainer.pem"
    public = write_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    private = read_key(path)
    assert public_half(private) == public
    for text in (public, str(path), f"{path}.pub"):
        assert read_public(text) == public
    before = path.read_bytes()
    with pytest.raises(KeyProblem, match="exists already"):
        write_key(path)
    assert path.read_bytes() == before


def test_keys_of_openssl_are_read(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    assert read_public(str(public)) == public_half(read_key(private))
    subprocess.run(["openssl", "genpkey", "-algorithm", "x25519", "-out", private], check=True)
    with pytest.raises(KeyProblem, match="another kind"):
        read_key(private)


@pytest.mark.parametrize(
    "content", [b"", b"ab" * 31, b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_damaged_key_files_are_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    for read in (read_key, lambda path: read_public(str(path))):
        with pytest.raises(KeyProblem):
            read(path)
    with pytest.raises(KeyProblem, match="can't be read"):
        read_key(tmp_path / "absent")


def test_a_key_vouches_for_its_successor_of_the_same_run_and_purpose() -> None:
    run = "6f2a0a54-9b43-4d6a-8a55-2f5c3c9f1d10"
    document = KeyDocument(PUBLISHER, run, KEYS[1])
    envelope = endorse(document, ONE)
    assert KeyDocument.from_bytes(envelope.payload) == document
    assert endorsers(envelope, document, KEYS) == {KEYS[0]}
    assert not endorsers(envelope, KeyDocument(PUBLISHER, "another", KEYS[1]), KEYS)
    assert not endorsers(envelope, KeyDocument(HEAD, None, KEYS[1]), KEYS)
    with pytest.raises(ManifestError, match="fields"):
        KeyDocument.from_bytes(KeyDocument(HEAD, run, KEYS[1]).to_bytes())
    with pytest.raises(ManifestError, match="where"):
        endorsers(Envelope.wrap(MANIFEST_TYPE, b"{}"), document, KEYS)
