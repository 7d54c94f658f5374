"""The environment of the control plane, read once and typed.

Every variable that the product knows is named here. A value that can't be read stops the start with one sentence;
nothing is guessed. Secrets may come from a file (`NAME_FILE`). Secrets that nobody gave are made once and kept in the
home folder, readable by their owner alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHECKOUT = Path(__file__).resolve().parent.parent
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})
SECRET_CHARACTERS = 64
HEAD_KEY = re.compile(r"[0-9a-f]{64}")
MOST_HEAD_KEYS = 4
BLOB_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file"})


class EnvironmentProblem(Exception):  # noqa: N818  it is about the deployment, not the program
    """A variable of the environment can't be used; the message names it and says what to set."""


@dataclass(frozen=True, slots=True)
class Database:
    """Where PostgreSQL is. `embedded` means that our own launcher runs it and `host` is its socket folder."""

    host: str
    port: str
    name: str
    user: str
    password: str
    embedded: bool
    options: tuple[tuple[str, str], ...] = ()


def text(name: str, default: str = "") -> str:
    """The variable, or `default` when it is unset or blank."""
    return os.environ.get(name, "").strip() or default


def flag(name: str, default: bool) -> bool:
    """A yes-or-no variable."""
    raw = os.environ.get(name)
    if raw is None:
        return default
    if raw.strip().lower() in TRUE:
        return True
    if raw.strip().lower() in FALSE:
        return False
    raise EnvironmentProblem(f"{name} must be 1 or 0, not {raw!r}.")


def integer(name: str, default: int, *, low: int, high: int) -> int:
    """A whole number within bounds."""
    raw = text(name)
    if not raw:
        return default
    if not raw.isascii() or not raw.isdecimal() or not low <= int(raw) <= high:
        raise EnvironmentProblem(f"{name} must be a whole number from {low} to {high}, not {raw!r}.")
    return int(raw)


def secret(name: str) -> str:
    """A secret from `NAME` or from the file that `NAME_FILE` names; empty when neither is set."""
    path = text(f"{name}_FILE")
    if not path:
        return text(name)
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"{name}_FILE names {path}, which can't be read: {error}.") from error


def home() -> Path:
    """The folder of everything that the control plane keeps on this machine."""
    return Path(text("MAILBOAT_HOME", str(CHECKOUT / "var"))).expanduser().absolute()


def kept_secret(name: str) -> str:
    """The secret `name`, made on first use in `home()/secrets` (0600, so that no other account reads it).

    It gets its name only when it is whole: neither a kill nor two first starts at once can leave half a secret.
    """
    folder = home() / "secrets"
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _make_secret(folder, path)
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(
            f"The secret {path} can't be made or read ({error}); set MAILBOAT_HOME to a folder of your own."
        ) from error
    if len(value) < SECRET_CHARACTERS:
        raise EnvironmentProblem(f"The secret {path} is damaged; remove it to have a new one made.")
    return value


def _make_secret(folder: Path, path: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=folder)  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(SECRET_CHARACTERS // 2))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another first start was quicker: its secret counts
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()


def peppers() -> dict[int, bytes]:
    """Numbered keys of the credential digests. The highest number signs new credentials; older ones still check."""
    raw = secret("MAILBOAT_PEPPERS") or f"1:{kept_secret('pepper')}"
    found: dict[int, bytes] = {}
    for item in raw.split(","):
        number, _, value = item.strip().partition(":")
        try:
            key = bytes.fromhex(value)
            if int(number) < 1 or len(key) < 16:
                raise ValueError(item)
        except ValueError:
            raise EnvironmentProblem(
                "MAILBOAT_PEPPERS must read 1:HEX,2:HEX with at least 32 hex digits each."
            ) from None
        found[int(number)] = key
    return found


def head_keys() -> dict[int, str]:
    """Numbered private keys (Ed25519 seeds, hex) that sign heads. See `controlplane.head_keys`."""
    raw = secret("MAILBOAT_HEAD_KEYS") or kept_secret("head-keys")
    found: dict[int, str] = {}
    for item in raw.split(","):
        number, value = item.strip().split(":", 1) if ":" in item else ("1", item.strip())
        if not (number.isascii() and number.isdecimal() and int(number) > 0 and HEAD_KEY.fullmatch(value)):
            raise EnvironmentProblem("MAILBOAT_HEAD_KEYS must read 1:HEX,2:HEX with 64 hex digits each.")
        found[int(number)] = value
    if len(found) > MOST_HEAD_KEYS:
        raise EnvironmentProblem(f"MAILBOAT_HEAD_KEYS holds more than {MOST_HEAD_KEYS} keys; retire old ones.")
    return found


def database() -> Database:
    """The database of `DATABASE_URL`, else the embedded one of `home()`."""
    url = secret("DATABASE_URL")
    if not url:
        from controlplane.embedded.postgres import socket_dir

        return Database(str(socket_dir(home())), "", "mailboat", "mailboat", "", embedded=True)
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"} or not parts.path.strip("/"):
        raise EnvironmentProblem("DATABASE_URL must read postgresql://USER:PASSWORD@HOST:PORT/NAME.")
    options = [tuple(item.split("=", 1)) for item in parts.query.split("&") if "=" in item]
    query = {key: unquote(value) for key, value in options}
    return Database(
        host=query.pop("host", "") or unquote(parts.hostname or ""),
        port=str(parts.port or ""),
        name=unquote(parts.path.lstrip("/")),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        embedded=False,
        options=tuple(sorted(query.items())),
    )


def checkpoint_roots() -> tuple[Path, ...]:
    """Folders under which workers may read checkpoints; empty switches that off."""
    roots = tuple(Path(item) for item in text("MAILBOAT_CHECKPOINT_ROOTS").split(os.pathsep) if item)
    for root in roots:
        if not root.is_absolute():
            raise EnvironmentProblem(f"MAILBOAT_CHECKPOINT_ROOTS must hold absolute folders, not {root}.")
    return roots


def blob_root() -> Path:
    """The folder of the local blob store."""
    return Path(text("MAILBOAT_BLOB_ROOT", str(home() / "blobs"))).expanduser().absolute()


def blob_url() -> str:
    """The object store; empty: the local folder."""
    url = text("MAILBOAT_BLOB_URL")
    parts = urlsplit(url)
    if url and (parts.scheme not in BLOB_SCHEMES or not (parts.netloc or parts.path.strip("/"))):
        raise EnvironmentProblem(
            "MAILBOAT_BLOB_URL must read s3://BUCKET/PREFIX, gs://..., az://... or file:///FOLDER."
        )
    return url


def names(name: str, default: str) -> list[str]:
    """A list divided by commas."""
    return [item.strip() for item in text(name, default).split(",") if item.strip()]
