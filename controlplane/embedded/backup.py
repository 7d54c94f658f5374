"""Backup and restore of a control plane: database, blobs of the local store, secrets.

    OUT/backup.json     what it is; written last, so that a folder without it is no backup
    OUT/database.dump   pg_dump's custom format
    OUT/blobs/runs/...  the blobs that the dumped rows name, as hard links where that is possible: blobs never change
    OUT/blobs/...       and the documents by which keys vouch for their successors, which lie nowhere else
    OUT/secrets/...     peppers and keys; with them, whoever has the backup is the control plane

The database is dumped in a snapshot, and the blobs are those that the same snapshot names, so the two fit whatever
happens meanwhile. Blobs in an object store stay where they are: it has versions and replicas of its own. A restore
never mixes with what is there: it refuses a database that is not empty unless it is told to replace it, and it raises
the generation of all heads, without which islands would refuse them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from controlplane.embedded.postgres import wheel_programs
from mailboat import __version__

FORMAT = 1
NOTE = "backup.json"


class BackupError(Exception):
    """A backup or restore that can't be done; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to reach a database: libpq's keywords."""

    parameters: dict[str, str]

    @property
    def conninfo(self) -> str:
        """As one string, without the password, which programs get in the environment."""
        return make_conninfo(**{key: value for key, value in self.parameters.items() if key != "password"})

    def connect(self) -> psycopg.Connection[Any]:
        """A connection. Raises BackupError."""
        try:
            return psycopg.connect(**self.parameters)  # type: ignore[arg-type]
        except psycopg.OperationalError as error:
            raise BackupError(f"The database can't be reached: {str(error).strip().splitlines()[0]}.") from error


def back_up(server: Server, out: Path, *, blobs: Path | None, secrets: Path) -> dict[str, Any]:
    """Writes a backup into `out`; a folder that holds an earlier one keeps the blobs that are in it already.

    :param blobs: the local store's folder; None where blobs lie in an object store.
    :raises BackupError: with the reason; `out` then holds no backup, even if it did before.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    (out / NOTE).unlink(missing_ok=True)
    with server.connect() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        snapshot = _one(connection, "SELECT pg_export_snapshot()")
        fresh = out / "database.dump.new"
        arguments = [f"--snapshot={snapshot}", "--format=custom", "--no-owner", "--no-privileges", f"--file={fresh}"]
        _run("pg_dump", server, connection.info.server_version // 10000, arguments)
        fresh.replace(out / "database.dump")
        named = connection.execute("SELECT run_id, sha256, size FROM registry_blob").fetchall()
    copied = 0 if blobs is None else _copy_blobs(named, blobs, out / "blobs", server)
    if blobs is not None:
        _copy_key_documents(blobs, out / "blobs")
    _copy_secrets(secrets, out / "secrets")
    note = {
        "format": FORMAT,
        "mailboat": __version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "blobs": None if blobs is None else len(named),
        "blob_bytes": sum(size for _, _, size in named),
        "copied": copied,
    }
    fresh = out / f"{NOTE}.new"
    fresh.write_text(json.dumps(note, indent=2) + "\n")
    fresh.replace(out / NOTE)
    return note


def describe(source: Path) -> dict[str, Any]:
    """What a backup is. Raises BackupError when it is none."""
    try:
        note: dict[str, Any] = json.loads((source / NOTE).read_text())
        if note["format"] != FORMAT:
            raise BackupError(f"{source} has backup format {note['format']}; this release reads {FORMAT}.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackupError(f"{source} holds no complete backup ({NOTE} is missing or damaged).") from error
    return note


def restore(server: Server, source: Path, *, blobs: Path | None, secrets: Path, replace: bool) -> None:
    """Puts a backup's database, blobs and secrets in place. The caller migrates and raises the generation afterwards.

    :raises BackupError: nothing was changed when the database is not empty or the backup is not whole.
    """
    note = describe(source)
    if (note["blobs"] is None) != (blobs is None):
        there = "an object store" if note["blobs"] is None else "a folder"
        raise BackupError(f"The blobs of this backup lie in {there}: set MAILBOAT_BLOB_URL as it was then.")
    with server.connect() as connection:
        version = connection.info.server_version // 10000
        tables = _one(connection, "SELECT count(*) FROM pg_tables WHERE schemaname IN ('public', 'pgmq')")
        if tables and not replace:
            raise BackupError("The database is not empty; --replace throws away what is in it.")
        if blobs is not None:
            _link_tree(source / "blobs", blobs)  # before the rows that name them
        for schema in ("pgmq", "public"):
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        connection.execute("CREATE SCHEMA public")
    arguments = ["--no-owner", "--no-privileges", "--exit-on-error", str(source / "database.dump")]
    _run("pg_restore", server, version, ["--single-transaction", *arguments])
    _copy_secrets(source / "secrets", secrets)


def _copy_blobs(named: Sequence[tuple[uuid.UUID, str, int]], store: Path, out: Path, server: Server) -> int:
    copied, lost = 0, []
    for run, sha256, size in named:
        place = Path("runs") / str(run) / "blobs" / sha256
        source, target = store / place, out / place
        if target.exists() and target.stat().st_size == size:
            continue
        try:
            if source.stat().st_size != size:
                raise FileNotFoundError(source)
            _link(source, target)
            copied += 1
        except FileNotFoundError:
            lost.append((run, sha256))
    for run, sha256 in lost:  # retention may have removed it meanwhile; then its row is gone too
        with server.connect() as connection:
            where = "SELECT count(*) FROM registry_blob WHERE run_id = %s AND sha256 = %s"
            row = connection.execute(where, [run, sha256]).fetchone()
        if row and row[0]:
            raise BackupError(f"The blob {sha256} is missing or damaged in {store}; restore it before you back up.")
    return copied


def _copy_key_documents(store: Path, out: Path) -> None:
    for pattern in ("runs/*/keys/*.json", "head-keys/*.json"):
        for file in store.glob(pattern):
            _link(file, out / file.relative_to(store))


def _link_tree(source: Path, target: Path) -> None:
    for file in source.rglob("*") if source.is_dir() else ():
        place = target / file.relative_to(source)
        if file.is_file() and not (place.exists() and place.stat().st_size == file.stat().st_size):
            _link(file, place)


def _link(source: Path, target: Path) -> None:
    """A second name for an immutable file; a copy where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.part")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, fresh)
    fresh.replace(target)


def _copy_secrets(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in source.iterdir() if source.is_dir() else ():
        if file.is_file():
            fresh = target / f".{file.name}.part"
            fresh.touch(mode=0o600)
            fresh.write_bytes(file.read_bytes())
            fresh.replace(target / file.name)


def _one(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query).fetchone()
    return row[0] if row else None


def _run(program: str, server: Server, major: int, arguments: Sequence[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    if "password" in server.parameters:
        environment["PGPASSWORD"] = server.parameters["password"]
    command = [str(_program(program, major)), "--dbname", server.conninfo, *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()
        raise BackupError(f"{program} failed: {said[0].strip() if said else 'it gave no reason'}")


def _program(name: str, major: int) -> Path:
    """The program of the server's own major version, else the oldest newer one, which can read it."""
    found = sorted((version, path) for path in _programs(name) if (version := _major(path)) >= major)
    if not found:
        raise BackupError(f"No {name} for PostgreSQL {major} was found; install PostgreSQL's client programs.")
    return found[0][1]


def _programs(name: str) -> Iterator[Path]:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    yield from (folder / name for folder in folders if os.access(folder / name, os.X_OK))
    wheel = wheel_programs()
    if wheel is not None:
        yield wheel / name


def _major(program: Path) -> int:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    match = re.search(r"\) (\d+)", said)
    return int(match[1]) if match else 0
