"""Backup and restore with everything real: the stack, a trainer, an island that nobody touches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from controlplane.embedded.backup import BackupError, Server, back_up, restore
from controlplane.embedded.postgres import EmbeddedPostgres, places, remove, set_aside
from controlplane.embedded.stack import Stack
from mailboat.client import Api
from mailboat.signing import write_key
from mailboat.trainer import Publisher
from tests.together.test_managed import CHECKOUT, at, database, island, manage, row, token
from tests.waiting import PATIENCE, eventually, free_port

__all__ = ["database"]  # a fixture


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MAILBOAT_", "DATABASE_URL"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def open_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mailboat-test-"))
    folder.chmod(0o711)
    yield folder / "home"
    for home in folder.iterdir():
        remove(home)
    shutil.rmtree(folder)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """The island whose store lies in a folder does nothing meanwhile."""
    store = str(folder / "store")
    (process,) = (found.pid for found in psutil.process_iter(["cmdline"]) if store in (found.info["cmdline"] or []))
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a57_islands_go_on_after_yesterdays_backup_is_restored(open_home: Path, tmp_path: Path) -> None:
    port = free_port()
    extra = {"MAILBOAT_HEARTBEAT_SECONDS": "1"}
    environment = {**os.environ, **extra, "MAILBOAT_HOME": str(open_home)}
    arrays = {"a": np.arange(20_000, dtype=np.uint16).reshape(200, 100)}
    out = tmp_path / "backup"
    with Stack(open_home, port, extra) as stack:
        stack.wait_ready(PATIENCE)
        manage("create_project", "harbour", environment=environment)
        publisher, operator_token = token("publisher", environment), token("operator", environment)
        operator = Api(stack.url, "harbour", operator_token)
        key = tmp_path / "trainer.pem"
        public = write_key(key)
        Api(stack.url, "harbour", publisher).create_run("voyage")
        operator.register_key("voyage", public)
        with Publisher(
            stack.url, "harbour", "voyage", publisher, state_dir=tmp_path / "copy", signing_key=key
        ) as trainer:
            trainer.publish(arrays, step=0).wait_ready(PATIENCE)
            following = island(stack.url, operator, tmp_path, environment, "--publisher-key", public)
            name = following.__enter__()
            try:
                eventually(lambda: at(operator, name) == 0)
                arrays["a"][1] ^= 1
                with frozen(tmp_path):
                    trainer.publish(arrays, step=1).wait_ready(PATIENCE)
                    assert "Backed up" in manage("backup", str(out), environment=environment)
                eventually(lambda: at(operator, name) == 1)
                refused = subprocess.run(
                    [sys.executable, "manage.py", "restore", str(out), "--replace"],
                    cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert refused.returncode == 1 and "stop it" in refused.stderr
                stack.stop()
                said = manage("restore", str(out), "--replace", environment=environment)
                assert "heads have generation" in said
                with Stack(open_home, port, extra) as again:
                    again.wait_ready(PATIENCE)
                    # It holds version 1, as it reported after the backup: it is asked for that report again.
                    eventually(lambda: at(operator, name) == 1)
                    served = operator.request("GET", "fleet/resolve", query={"run": "voyage", "min_version": 1}).data
                    assert [found["name"] for found in json.loads(served)["islands"]] == [name]
                    arrays["a"][2] ^= 1
                    trainer.publish(arrays, step=2).wait_ready(PATIENCE)
                    eventually(lambda: at(operator, name) == 2)
                manage("restore", str(out), "--replace", environment=environment)
                with Stack(open_home, port, extra) as again:
                    again.wait_ready(PATIENCE)
                    # It holds version 2, which the record has never heard of, and goes to what the new head names.
                    marker = tmp_path / "store" / "marker.json"
                    eventually(lambda: json.loads(marker.read_text())["version"] == 1)
                    eventually(lambda: (found := row(operator, name)) and found["sync"]["state"] == "current")
                    assert row(operator, name)["trusted_keys"] == [public]
                    arrays["a"][7] ^= 1
                    trainer.publish(arrays, step=3).wait_ready(PATIENCE)
                    eventually(lambda: at(operator, name) == 2)
            finally:
                following.__exit__(None, None, None)


def filled(url: str, folder: Path) -> Server:
    """A migrated database with one blob in a local store."""
    environment = {**os.environ, "DATABASE_URL": url, "MAILBOAT_HOME": str(folder)}
    manage("migrate", "-v0", environment=environment)
    manage("create_project", "harbour", environment=environment)
    ask = (
        "import django; django.setup()\n"
        "from controlplane.registry import services as s; from controlplane.registry.models import Project\n"
        "run = s.create_run(Project.objects.get(), 'voyage', actor='test'); s.add_blob(run, b'weights')"
    )
    environment["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    subprocess.run([sys.executable, "-c", ask], cwd=CHECKOUT, env=environment, check=True)
    return Server({key: str(value) for key, value in conninfo_to_dict(url).items()})


def test_a_managed_database_comes_back_as_it_was(database: str, tmp_path: Path) -> None:
    server, out = filled(database, tmp_path / "home"), tmp_path / "out"
    store, secrets = tmp_path / "home" / "blobs", tmp_path / "home" / "secrets"
    (store / "head-keys").mkdir()
    (store / "head-keys" / "key.json").write_bytes(b"a word for a key")
    assert back_up(server, out, blobs=store, secrets=secrets)["copied"] == 1
    assert back_up(server, out, blobs=store, secrets=secrets)["copied"] == 0
    assert oct((out / "secrets" / "pepper").stat().st_mode)[-3:] == "600"
    with pytest.raises(BackupError, match="not empty"):
        restore(server, out, blobs=store, secrets=secrets, replace=False)
    elsewhere = tmp_path / "elsewhere"
    for _ in range(2):  # a database that was restored once can be restored again
        restore(server, out, blobs=elsewhere / "blobs", secrets=elsewhere / "secrets", replace=True)
        back_up(server, out, blobs=elsewhere / "blobs", secrets=elsewhere / "secrets")
    with server.connect() as connection:
        assert connection.execute("select slug from registry_project").fetchall() == [("harbour",)]
    (blob,) = (elsewhere / "blobs").glob("runs/*/blobs/*")
    assert blob.read_bytes() == b"weights"
    assert (elsewhere / "blobs" / "head-keys" / "key.json").read_bytes() == b"a word for a key"
    blob.unlink()
    with pytest.raises(BackupError, match="missing or damaged"):
        back_up(server, tmp_path / "other", blobs=elsewhere / "blobs", secrets=secrets)
    with pytest.raises(BackupError, match="no complete backup"):
        restore(server, tmp_path / "other", blobs=store, secrets=secrets, replace=True)


@pytest.mark.long
def test_a_backup_moves_to_the_next_major_version(database: str, open_home: Path, tmp_path: Path) -> None:
    """From PostgreSQL 15 into the embedded 18, over data that an older embedded one left."""
    server, out = filled(database, tmp_path / "home"), tmp_path / "out"
    back_up(server, out, blobs=tmp_path / "home" / "blobs", secrets=tmp_path / "home" / "secrets")
    with EmbeddedPostgres(open_home):
        pass
    (places(open_home).data / "PG_VERSION").write_text("17\n")
    environment = {**os.environ, "MAILBOAT_HOME": str(open_home)}
    assert "data.17" in manage("restore", str(out), environment=environment)
    with EmbeddedPostgres(open_home) as postgres, psycopg.connect(postgres.url) as connection:
        assert connection.execute("select slug from registry_project").fetchall() == [("harbour",)]
        found = connection.execute("select generation from registry_channel").fetchall()
        assert found and all(generation > 1_000_000 for (generation,) in found)
    assert set_aside(open_home) is None
