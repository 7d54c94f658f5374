"""The island's keys: its own Ed25519 key, and the bearer credential with the one that is to take its place.

A new credential is kept beside the old one until the control plane has accepted it; a refusal goes back to the old one.
It must never forget the old one before that, or a lost answer would lock the island out. The file ends with a digest of
what it says: a damaged one must never be sent, since what the server makes of it leads astray.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mailboat.client import Api
from mailboat.errors import StoreError
from mailboat.identity import new_key
from mailboat.island.store import Store
from mailboat.replies import Enrolment

CREDENTIAL, KEY, NEXT = "credential", "key", "next"
CHECK = "sha256"  # of the other fields
FIELDS = {field.name for field in fields(Enrolment)} | {"server", "project", NEXT}

ANEW = "remove the island on the fleet page, register it again, and start it once with the new --token"


class CredentialDamaged(StoreError):  # noqa: N818 - as the library's other errors, named for what happened
    """The file of the credential does not say what was written to it."""


def read_credential(store: Store) -> dict[str, Any] | None:
    """What the store keeps of the island's enrolment; None when there is none. Raises CredentialDamaged."""
    path = store.root / f"{CREDENTIAL}.json"
    kept = store.note(CREDENTIAL)
    if kept is None and not path.exists():
        return None
    check = None if kept is None else kept.pop(CHECK, None)
    # Files from before there were digests have none; with a damaged name of that field, another one is too many.
    if kept is None or (check != _digest(kept) if check is not None else not kept.keys() <= FIELDS):
        raise CredentialDamaged(f"The credential in {path} is damaged: put the file back, or {ANEW}.")
    return kept


def write_credential(store: Store, body: Mapping[str, Any]) -> None:
    """Keeps it, durably and for its owner alone."""
    store.set_note(CREDENTIAL, {**body, CHECK: _digest(body)})


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(body), sort_keys=True).encode()).hexdigest()


def private_key(store: Store) -> str:
    """The island's private key (hex), made on first use; it never leaves the store."""
    kept = store.note(KEY)
    if kept is not None and isinstance(kept.get("private"), str):
        return str(kept["private"])
    made = new_key()
    store.set_note(KEY, {"private": made})
    return made


class Credentials:
    """Which credential the island's calls carry. Safe to use from several threads."""

    def __init__(self, store: Store, api: Api) -> None:
        self._store = store
        self._api = api
        self._lock = threading.Lock()
        self._kept = read_credential(store) or {}
        self._next: str | None = self._kept.get(NEXT)
        if self._next is not None:
            api.token = self._next

    @property
    def on_trial(self) -> bool:
        """Whether a new credential is in use that nobody has accepted yet."""
        return self._next is not None

    def offered(self, credential: str) -> None:
        """The control plane handed out a new credential: the next call tries it."""
        with self._lock:
            self._write({NEXT: credential})
            self._next = self._api.token = credential

    def accepted(self) -> None:
        """A call went through: a credential on trial takes the place of the old one."""
        with self._lock:
            if self._next is not None:
                self._write({CREDENTIAL: self._next, NEXT: None})
                self._next = None

    def refused(self) -> bool:
        """A call was answered 401: goes back to the old credential. False when none was on trial."""
        with self._lock:
            if self._next is None:
                return False
            self._write({NEXT: None})
            self._next, self._api.token = None, self._kept.get(CREDENTIAL)
            return True

    def _write(self, changes: dict[str, str | None]) -> None:
        body = {name: value for name, value in {**self._kept, **changes}.items() if value is not None}
        write_credential(self._store, body)
        self._kept = body
