"""The island's keys: its own Ed25519 key, and the bearer credential with the one that is to take its place.

A new credential is kept beside the old one until the control plane has accepted it; a refusal goes back to the old one.
It must never forget the old one before that, or a lost answer would lock the island out.
"""

from __future__ import annotations

import threading

from mailboat.client import Api
from mailboat.identity import new_key
from mailboat.island.store import Store

CREDENTIAL, KEY, NEXT = "credential", "key", "next"


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
        kept = store.note(CREDENTIAL) or {}
        self._next: str | None = kept.get(NEXT)
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
            kept = self._store.note(CREDENTIAL) or {}
            self._write({NEXT: None})
            self._next, self._api.token = None, kept.get(CREDENTIAL)
            return True

    def _write(self, changes: dict[str, str | None]) -> None:
        body = {**(self._store.note(CREDENTIAL) or {}), **changes}
        self._store.set_note(CREDENTIAL, {name: value for name, value in body.items() if value is not None})
