"""Signatures: Ed25519 over the exact bytes in an envelope, key files, and documents by which a key vouches for its
successor.

A key is named by its public half, 64 hex digits; `keyid` in an envelope is that name. Nothing here may ever print, log
or send a private half, nor take a signature of one payload type for one of another: the type is part of what is signed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mailboat import canonical
from mailboat.errors import MailboatError, ManifestError
from mailboat.identity import public_half
from mailboat.manifest import MAX_SIGNATURES, Envelope, Signature

KEY_TYPE = "application/vnd.mailboat.key+json"
PUBLISHER, HEAD = "publisher", "head"
_KEY_FORMAT = "mailboat-key-1"
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_MAX_FILE = 1 << 14


class KeyProblem(MailboatError):  # noqa: N818 - about a file, named for what it is
    """A key file or public key can't be used."""

    code = "key_invalid"


def sign(envelope: Envelope, private: str) -> Envelope:
    """The envelope with one more signature; an earlier one of the same key is replaced."""
    public = public_half(private)
    others = [signature for signature in envelope.signatures if signature.keyid != public]
    if len(others) >= MAX_SIGNATURES:
        raise ManifestError(f"An envelope carries at most {MAX_SIGNATURES} signatures; use fewer keys.")
    made = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private)).sign(envelope.pae())
    return Envelope.wrap(envelope.payload_type, envelope.payload, [*others, Signature(public, made)])


def signers(envelope: Envelope, keys: Iterable[str]) -> frozenset[str]:
    """Those of ``keys`` whose signature the envelope carries and whose signature is right."""
    wanted = set(keys)
    data = envelope.pae()
    return frozenset(s.keyid for s in envelope.signatures if s.keyid in wanted and _is_right(s, data))


def _is_right(signature: Signature, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.keyid)).verify(signature.sig, data)
    except (InvalidSignature, ValueError):
        return False
    return True


# -- key files


def write_key(path: Path) -> str:
    """Makes a key: the private half goes into ``path`` (PKCS #8 PEM, readable by its owner alone), the public half into
    ``path``.pub and is returned. Raises KeyProblem rather than write over a key.
    """
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes_raw().hex()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        path.with_name(path.name + ".pub").write_text(public + "\n")
    except FileExistsError:
        raise KeyProblem(f"{path} exists already; a key is never written over, so choose another name.") from None
    except OSError as error:
        raise KeyProblem(f"The key {path} can't be written: {error.strerror or error}.") from error
    return public


def read_key(path: Path) -> str:
    """The private key (hex) of a PKCS #8 PEM file without a passphrase. Raises KeyProblem."""
    try:
        loaded = serialization.load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError) as error:
        raise KeyProblem(
            f"{path} holds no private key in PEM without a passphrase; see `mailboat keys new`."
        ) from error
    if not isinstance(loaded, Ed25519PrivateKey):
        raise KeyProblem(f"{path} holds a key of another kind; Mailboat signs with Ed25519.")
    return loaded.private_bytes_raw().hex()


def read_public(text: str) -> str:
    """The public key (hex) that ``text`` is, or that the file of that name holds: hex, or PEM of either half."""
    if _PUBLIC.fullmatch(text):
        return text
    path = Path(text)
    content = _content(path)
    said = content.decode("ascii", "replace").strip()
    if _PUBLIC.fullmatch(said):
        return said
    if b"PRIVATE KEY" in content:
        return public_half(read_key(path))
    try:
        loaded = serialization.load_pem_public_key(content)
    except ValueError as error:
        raise KeyProblem(f"{path} holds no Ed25519 public key; give 64 hex digits, or a file with them.") from error
    if not isinstance(loaded, Ed25519PublicKey):
        raise KeyProblem(f"{path} holds a key of another kind; Mailboat signs with Ed25519.")
    return loaded.public_bytes_raw().hex()


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE)
    except OSError as error:
        raise KeyProblem(
            f"The key {path} can't be read ({error.strerror or error}); give a file, or a public key as 64 hex digits."
        ) from error


# -- a key that vouches for the next one


@dataclass(frozen=True, slots=True)
class KeyDocument:
    """Names a public key and what it is for: `publisher` of one run (its UUID), or `head` of a control plane (no run).

    Signed by an older key of the same purpose, it makes whoever trusts that one trust this one.
    """

    purpose: str
    run: str | None
    public_key: str

    def to_bytes(self) -> bytes:
        """The exact bytes: canonical JSON."""
        return canonical.encode({**{name: getattr(self, name) for name in self.__slots__}, "format": _KEY_FORMAT})

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyDocument:
        """Parses exact bytes strictly; raises ManifestError."""
        match canonical.decode(data, what="The key document", error=ManifestError, max_bytes=_MAX_FILE):
            case {"format": str(form), "purpose": str(purpose), "run": run, "public_key": str(public), **rest} if (
                form == _KEY_FORMAT
                and not rest
                and _PUBLIC.fullmatch(public)
                and ((purpose == PUBLISHER and isinstance(run, str)) or (purpose == HEAD and run is None))
            ):
                return cls(purpose, run, public)
        raise ManifestError(f"The key document does not have the fields of {_KEY_FORMAT}.")


def endorse(document: KeyDocument, private: str) -> Envelope:
    """The document in an envelope that the older key signs."""
    return sign(Envelope.wrap(KEY_TYPE, document.to_bytes()), private)


def endorsers(envelope: Envelope, document: KeyDocument, keys: Iterable[str]) -> frozenset[str]:
    """Those of ``keys`` that vouch for exactly this document in the envelope. Raises ManifestError for another kind of
    envelope.
    """
    if KeyDocument.from_bytes(envelope.open(KEY_TYPE)) != document:
        return frozenset()
    return signers(envelope, keys)
