"""An island's own key (Ed25519): made once, kept in its store, shown to operators as a fingerprint.

The private half never leaves the machine. What is signed says what it is for, so that a signature can't serve twice.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def new_key() -> str:
    """A fresh private key: 32 bytes as hex."""
    return Ed25519PrivateKey.generate().private_bytes_raw().hex()


def public_half(private: str) -> str:
    """The public key that belongs to a private one: 32 bytes as hex. Raises ValueError when it is not one."""
    return _private(private).public_key().public_bytes_raw().hex()


def fingerprint(public: str) -> str:
    """How people compare a public key (hex): `SHA256:` and the base64 of its SHA-256, as OpenSSH writes it."""
    digest = hashlib.sha256(bytes.fromhex(public)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def sign_enrolment(private: str, project: str, token: str) -> str:
    """The proof, sent with an enrolment, that the island holds the private half: a signature as hex."""
    return _private(private).sign(_enrolment(public_half(private), project, token)).hex()


def proves_enrolment(public: str, signature: str, project: str, token: str) -> bool:
    """Whether `sign_enrolment` made the signature for this project and enrolment token with the key's private half."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _enrolment(public, project, token))
    except (InvalidSignature, ValueError):
        return False
    return True


def _enrolment(public: str, project: str, token: str) -> bytes:
    """The token stands here as its digest: nobody has to keep a secret in order to check a signature."""
    return "\n".join(("mailboat enrolment 1", public, project, hashlib.sha256(token.encode()).hexdigest())).encode()


def _private(private: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
