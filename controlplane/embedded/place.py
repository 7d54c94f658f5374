"""What backup and restore need to know of this deployment: its database, running, and the folder of its blobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection

from controlplane.embedded.backup import BackupError, Server
from controlplane.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError, socket_dir

_KEYWORDS = {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user", "PASSWORD": "password"}


@contextmanager
def database_of_settings() -> Iterator[Server]:
    """The database that Django uses; the embedded server runs meanwhile. Raises BackupError."""
    found, home = connection.settings_dict, Path(settings.MAILBOAT_HOME)
    if not settings.MAILBOAT_DATABASE.embedded:
        yield _server(found)
        return
    try:
        with EmbeddedPostgres(home):
            found["HOST"] = str(socket_dir(home))  # of a fresh home it is decided by the first start
            yield _server(found)
    except EmbeddedPostgresError as error:
        raise BackupError(str(error)) from error


def _server(found: dict[str, Any]) -> Server:
    parameters = {keyword: str(found[key]) for key, keyword in _KEYWORDS.items() if found[key]}
    return Server(parameters | {key: str(value) for key, value in found["OPTIONS"].items()})


def stored_blobs() -> Path | None:
    """The local store's folder; None for an object store."""
    return None if settings.MAILBOAT_BLOB_URL else Path(settings.MAILBOAT_BLOB_ROOT)
