"""Secrets that travel once. What is stored is an HMAC under a numbered pepper, so that a copy of the database opens
nothing.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass

from django.conf import settings

_SHAPE = re.compile(r"(mb|mbe)_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
BEARER, ENROLMENT = "mb", "mbe"


@dataclass(frozen=True, slots=True)
class Credential:
    """A new credential. `plaintext` is shown once and kept nowhere."""

    plaintext: str
    key_id: str
    digest: str
    pepper: int


def new(kind: str) -> Credential:
    """A fresh credential under the newest pepper."""
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    pepper = max(settings.MAILBOAT_PEPPERS)
    return Credential(f"{kind}_{key_id}_{secret}", key_id, _digest(secret, pepper), pepper)


def again(secret: str) -> dict[str, object]:
    """Digest and pepper of a known secret under the newest pepper, as columns."""
    pepper = max(settings.MAILBOAT_PEPPERS)
    return {"digest": _digest(secret, pepper), "pepper": pepper}


def split(plaintext: str, kind: str) -> tuple[str, str] | None:
    """Key id and secret, or None when the text is not a credential of this kind."""
    match = _SHAPE.fullmatch(plaintext)
    return (match[2], match[3]) if match and match[1] == kind else None


def matches(secret: str, digest: str, pepper: int) -> bool:
    """Compares in constant time. A pepper that was taken out of service opens nothing."""
    return pepper in settings.MAILBOAT_PEPPERS and hmac.compare_digest(_digest(secret, pepper), digest)


def _digest(secret: str, pepper: int) -> str:
    return hmac.new(settings.MAILBOAT_PEPPERS[pepper], secret.encode(), "sha256").hexdigest()
