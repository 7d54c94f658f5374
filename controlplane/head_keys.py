"""The keys that sign heads: Ed25519, numbered, held by the control plane's machines alone.

They come from MAILBOAT_HEAD_KEYS (`1:HEX,2:HEX`), else from `secrets/head-keys` in the home folder, made on first use
and read again for each signature, so that a rotation needs no restart. A head carries a signature of every key: islands
that know only the old one go on, and a document signed by the old one makes them trust the new one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from controlplane import env
from mailboat.identity import new_key, public_half

VARIABLE = "MAILBOAT_HEAD_KEYS"
NAME = "head-keys"


def current() -> dict[int, str]:
    """The private keys (hex) by their numbers. Raises EnvironmentProblem."""
    return env.head_keys()


def public() -> dict[int, str]:
    """The public halves by their numbers."""
    return {number: public_half(private) for number, private in current().items()}


def add() -> int:
    """Makes a further key in the home folder and returns its number. Raises EnvironmentProblem."""
    keys = current()
    number = max(keys) + 1
    _write({**keys, number: new_key()})
    return number


def retire(number: int) -> None:
    """Forgets a key in the home folder: heads carry its signature no more. Raises EnvironmentProblem."""
    keys = current()
    if number not in keys or len(keys) == 1:
        raise env.EnvironmentProblem(f"There is no head key {number} beside another one, so nothing was retired.")
    _write({other: private for other, private in keys.items() if other != number})


def _write(keys: dict[int, str]) -> None:
    if env.secret(VARIABLE):
        raise env.EnvironmentProblem(
            f"Head keys come from {VARIABLE} here: make one with `openssl rand -hex 32`, put it there with the next "
            "number on every machine, restart, and run `manage.py head_keys announce`."
        )
    if len(keys) > env.MOST_HEAD_KEYS:
        raise env.EnvironmentProblem(f"There may be at most {env.MOST_HEAD_KEYS} head keys; retire an old one first.")
    folder = env.home() / "secrets"
    handle, temporary = tempfile.mkstemp(dir=folder)  # 0600
    with os.fdopen(handle, "w") as file:
        file.write(",".join(f"{number}:{private}" for number, private in sorted(keys.items())))
        file.flush()
        os.fsync(file.fileno())
    Path(temporary).replace(folder / NAME)
