"""Where one home's PostgreSQL server lives and which account runs it.

Folders are private; a folder that belongs to somebody else is refused, and permissions of folders that are not ours are
never loosened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_PATH_BYTES = 107  # sockaddr_un: 108 bytes with the closing zero
_UNPRIVILEGED = "nobody"


class EmbeddedPostgresError(Exception):
    """The embedded server can't run; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where one home's server lives: ``folder`` holds data, locks and log, ``sockets`` the socket (a short path)."""

    folder: Path
    sockets: Path

    @property
    def data(self) -> Path:
        """The cluster itself."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.folder / "server.log"


def places(home: Path) -> Places:
    """The places in use for this home: as recorded by the last start, else where they would be."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(_record(home).read_text())
        return Places(Path(record["folder"]), Path(record["sockets"]))
    folder = home.resolve() / "postgres"
    return Places(folder, folder / "socket")


def socket_dir(home: Path) -> Path:
    """The folder of the server's socket."""
    return places(home).sockets


class Identity(TypedDict, total=False):
    """Keyword arguments of ``subprocess`` that name an account."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """The account that runs the server, and the name of the one that may connect."""

    uid: int
    gid: int
    client: str

    @property
    def drops(self) -> bool:
        """Whether the server runs as somebody else than this process."""
        return self.uid != os.geteuid()

    def subprocess_options(self) -> Identity:
        """Keyword arguments that start a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.drops else {}


def account_of_server() -> Account:
    """The account for the server of this process: its own, or one without rights when this is root."""
    uid = os.geteuid()
    try:
        client = pwd.getpwuid(uid).pw_name
        if uid != 0:
            return Account(uid, os.getegid(), client)
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError as error:
        missing = f"the user number {uid}" if uid else f"the account '{_UNPRIVILEGED}'"
        raise EmbeddedPostgresError(
            f"The system does not know {missing}, which PostgreSQL needs: "
            "add it to /etc/passwd or set DATABASE_URL to another server."
        ) from error
    return Account(entry.pw_uid, entry.pw_gid, client)


def _record(home: Path) -> Path:
    return home / "postgres.json"


def prepare(home: Path, account: Account, say: Callable[[str], None]) -> Places:
    """Choose, create and check the folders, and record them so that other programs of this home find the socket."""
    known = places(home)
    folder = known.folder
    if not folder.is_dir():
        folder = home.resolve() / "postgres"
    if account.drops and (closed := closed_to(folder.parent, account)) is not None:
        elsewhere = Path("/var/lib") / f"mailboat-{_short(home)}"
        if elsewhere != folder:
            say(f"mailboat: {closed} is closed to the account that runs PostgreSQL, so its data lies in {elsewhere}.")
        folder = elsewhere
    _private_folder(folder, account)
    sockets = folder / "socket"
    if len(os.fsencode(sockets / SOCKET_NAME)) > _SOCKET_PATH_BYTES:
        sockets = (
            known.sockets
            if _is_private(known.sockets, account) and known.sockets != sockets
            else _short_folder(account)
        )
    else:
        _private_folder(sockets, account)
    chosen = Places(folder, sockets)
    if chosen != known or not _record(home).exists():
        _write_atomically(_record(home), json.dumps({"folder": str(folder), "sockets": str(sockets)}))
    return chosen


def _short(home: Path) -> str:
    return hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:12]


def closed_to(folder: Path, account: Account) -> Path | None:
    """The first folder on the way that the account may not pass, or None."""
    for step in (*reversed(folder.parents), folder):
        status = step.stat()
        if status.st_uid == account.uid:
            passable = status.st_mode & stat.S_IXUSR
        elif status.st_gid == account.gid:
            passable = status.st_mode & stat.S_IXGRP
        else:
            passable = status.st_mode & stat.S_IXOTH
        if not passable:
            return step
    return None


def _private_folder(folder: Path, account: Account) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(folder)
        if account.drops:
            if status.st_uid not in (0, account.uid):
                raise PermissionError(folder)
            os.chown(folder, account.uid, account.gid, follow_symlinks=False)
        elif status.st_uid != account.uid:
            raise PermissionError(folder)
        folder.chmod(0o700)
    except OSError as error:
        reason = error.strerror or "it belongs to another account or is no folder"
        raise EmbeddedPostgresError(
            f"The folder {folder} can't be used for PostgreSQL ({reason}): remove it or choose another MAILBOAT_HOME."
        ) from error


def _is_private(folder: Path, account: Account) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == account.uid and stat.S_IMODE(status.st_mode) == 0o700


def _short_folder(account: Account) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mailboat-", dir="/tmp"))
    if account.drops:
        os.chown(folder, account.uid, account.gid)
    return folder


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
