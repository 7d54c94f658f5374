"""Services for all tests: an embedded PostgreSQL for the session, and a real HTTP server on request.

`scripts/test` sets MAILBOAT_HOME to a folder of the tests; the PostgreSQL there is started once, by the process that
controls the test run, and shared by its parallel workers, each with a database of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

_postgres: Any = None


def pytest_configure(config: pytest.Config) -> None:
    """Start the database before any worker needs it."""
    global _postgres  # noqa: PLW0603 - one per session
    # A shell that runs the tests in the background has them ignore Ctrl-C, and whatever they start would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or os.environ.get("DATABASE_URL") or config.option.collectonly:
        return
    home = os.environ.get("MAILBOAT_HOME")
    if not home:
        pytest.exit("MAILBOAT_HOME is not set; run the tests with scripts/test", returncode=2)
    from controlplane.embedded.postgres import EmbeddedPostgres

    _postgres = EmbeddedPostgres(Path(home))
    _postgres.start(timeout=2 * PATIENCE)


def pytest_unconfigure() -> None:
    """Stop what was started."""
    if _postgres is not None:
        _postgres.stop()


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Path:
    """A folder of its own for blobs, uploads and workers' copies."""
    folder = tmp_path / "home"
    folder.mkdir()
    settings.MAILBOAT_HOME = folder
    settings.MAILBOAT_BLOB_ROOT = folder / "blobs"
    return folder


@pytest.fixture
def database_url(transactional_db: None) -> str:
    """The test database as other processes reach it."""
    from django.db import connection

    s = connection.settings_dict
    host = s["HOST"]
    if host.startswith("/"):
        return f"postgresql://{s['USER']}@/{s['NAME']}?host={host}"
    password = f":{s['PASSWORD']}" if s["PASSWORD"] else ""
    return f"postgresql://{s['USER']}{password}@{host}:{s['PORT'] or 5432}/{s['NAME']}"


@pytest.fixture
def server(transactional_db: None, home: Path) -> Iterator[str]:
    """The control plane's real ASGI application behind a real socket; its address."""
    import uvicorn
    from django.db import connections

    from controlplane.asgi import application

    listener = socket.create_server(("127.0.0.1", 0))
    instance = uvicorn.Server(
        uvicorn.Config(application, log_level="warning", lifespan="auto", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        instance.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        connections.close_all()
