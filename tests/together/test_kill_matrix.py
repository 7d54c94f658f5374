"""Whoever is killed, and whenever: a table of moments at which a process of the control plane dies by SIGKILL while an
island follows. The island gets to the newest version by itself, and its exports never show bytes that nobody published.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from controlplane.embedded.postgres import database_url, places
from controlplane.embedded.stack import Stack
from mailboat.checkpoint.files import Checkpoint
from mailboat.client import Api
from mailboat.digest import measure
from mailboat.errors import CheckpointError, MailboatError
from mailboat.trainer import Publisher
from tests.together.test_backup import _own_environment, open_home
from tests.together.test_managed import at, island, manage, token
from tests.waiting import PATIENCE, eventually, free_port
from tests.workers.checkpoints import Arrays, first, following, source, write

__all__ = ["_own_environment", "open_home"]  # fixtures

ROWS = 150_000  # 19 MB, so that each kind of work takes a while
TRIES = 6  # of a moment that was over before the process could be stopped


@dataclass(frozen=True)
class Moment:
    """``during``: what has to be going on, as a query with rows while it is; ``victim``: who dies then."""

    name: str
    during: str
    victim: str
    asks: str = "publish"  # how the work is asked for


MERGING = "select 1 from jobs_job where kind = 'merge' and state = 'running'"
MOMENTS = (
    Moment("a worker that builds", "select 1 from registry_version where state = 'building'", "publish", "build"),
    Moment("a worker that validates", "select 1 from registry_version where state = 'validating'", "publish"),
    Moment("a worker that merges", MERGING, "merge", "merge"),
    Moment("the web server", "select 1 from registry_version where state = 'validating'", "web"),
    Moment("PostgreSQL", "select 1 from registry_version where state = 'validating'", "PostgreSQL"),
)


@dataclass
class Scene:
    """The control plane, whoever publishes, and what was published: states by number."""

    home: Path
    stack: Stack
    operator: Api
    committer: Api
    trainer: Publisher
    folder: Path
    arrays: Arrays
    published: dict[int, str] = field(default_factory=dict)

    def ask(self, how: str) -> None:
        """The next version, or a merge to the newest one. Tried again while the control plane recovers."""
        newest = max(self.published, default=-1)
        if how == "merge":
            persistently(lambda: self.operator.create_job("merge", run="voyage", **{"from": newest - 1, "to": newest}))
            return
        if self.published:
            self.arrays = following(self.arrays, newest)
        state = measure(source(self.arrays)).digest
        checkpoint = write(self.arrays, self.folder / "checkpoints" / str(newest + 1))
        self.published[newest + 1] = state  # before anybody can hold it
        if how == "build":
            facts = {"number": newest + 1, "parent": newest, "epoch": 0}
            persistently(lambda: self.committer.commit_checkpoint("voyage", str(checkpoint), **facts))
        else:
            persistently(lambda: self.trainer.publish_checkpoint(checkpoint).wait_ready(PATIENCE))

    def pid(self, victim: str) -> int:
        """The process that is to die."""
        if victim == "PostgreSQL":
            return int((places(self.home).data / "postmaster.pid").read_text().split()[0])
        return self.stack.pids()[victim]

    def rows(self, query: str) -> list[Any]:
        """What the database says, when it is there."""
        with psycopg.connect(database_url(self.home), autocommit=True) as connection:
            return connection.execute(query).fetchall()

    def killed_at(self, moment: Moment) -> bool:
        """Kills at the moment; False when it was over before the process stood still."""
        with psycopg.connect(database_url(self.home), autocommit=True) as connection:
            eventually(lambda: connection.execute(moment.during).fetchall())
            pid = self.pid(moment.victim)
            if moment.victim != "PostgreSQL":
                os.kill(pid, signal.SIGSTOP)
                if not connection.execute(moment.during).fetchall():
                    os.kill(pid, signal.SIGCONT)
                    return False
            os.kill(pid, signal.SIGKILL)
        return True

    def at_rest(self) -> bool:
        """Whether every job has ended well and every version is ready."""
        try:
            jobs = {state for (state,) in self.rows("select state from jobs_job where kind <> 'verify'")}
            versions = {state for (state,) in self.rows("select state from registry_version")}
        except psycopg.OperationalError:
            return False
        assert "failed" not in jobs | versions, (jobs, versions)
        return jobs <= {"succeeded"} and versions == {"ready"}


def persistently(call: Callable[[], Any]) -> None:
    """Calls until it goes through: what restarts needs a moment, and repeating is harmless."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            call()
        except MailboatError as error:
            assert time.monotonic() < deadline, str(error)
            time.sleep(0.1)
            continue
        return


@contextlib.contextmanager
def reader(current: Path) -> Iterator[set[str]]:
    """Reads the island's export all the time; the states that it has shown."""
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.wait(0.02):
            seen.update(filter(None, [shown(current)]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join(PATIENCE)


def shown(current: Path) -> str:
    """The state of an export; empty when there is none, or it was let go while it was read."""
    try:
        with Checkpoint.open(current.resolve(strict=True)) as checkpoint:
            return measure(checkpoint).digest
    except (OSError, CheckpointError):
        return ""


@pytest.mark.long
def test_a49_a50_whoever_is_killed_the_island_converges_and_shows_published_states_alone(
    open_home: Path, tmp_path: Path
) -> None:
    port = free_port()
    (tmp_path / "checkpoints").mkdir()
    extra = {
        "MAILBOAT_HEARTBEAT_SECONDS": "1", "MAILBOAT_LEASE_SECONDS": "6",
        "MAILBOAT_CHECKPOINT_ROOTS": str(tmp_path / "checkpoints"),
    }  # fmt: skip
    environment = {**os.environ, **extra, "MAILBOAT_HOME": str(open_home)}
    with Stack(open_home, port, extra) as stack:
        stack.wait_ready(PATIENCE)
        manage("create_project", "harbour", environment=environment)
        operator = Api(stack.url, "harbour", token("operator", environment))
        publisher = token("publisher", environment)
        with Publisher(stack.url, "harbour", "voyage", publisher, state_dir=tmp_path / "copy") as trainer:
            committer = Api(stack.url, "harbour", publisher)
            scene = Scene(open_home, stack, operator, committer, trainer, tmp_path, first(rows=ROWS))
            scene.ask("publish")
            with psycopg.connect(database_url(open_home)) as connection:
                connection.execute("update registry_run set merge_up_to = 0")  # merges come when they are asked for
            current = tmp_path / "export" / "current"
            with (
                island(stack.url, operator, tmp_path, environment, "--export", str(tmp_path / "export")) as name,
                reader(current) as seen,
            ):
                eventually(lambda: shown(current) == scene.published[0])
                for moment in MOMENTS:
                    kill_and_converge(scene, moment, name, current)
            assert seen <= set(scene.published.values()) and len(seen) > 1


def kill_and_converge(scene: Scene, moment: Moment, name: str, current: Path) -> None:
    """Asks for the work, kills within it, and waits until everything is as if nothing had happened."""

    def arrived() -> bool:
        try:
            return scene.at_rest() and at(scene.operator, name) == max(scene.published)
        except MailboatError:
            return False

    for _ in range(TRIES):
        if moment.asks == "merge":
            scene.ask("publish")
        asking = threading.Thread(target=scene.ask, args=(moment.asks,), daemon=True)
        asking.start()
        hit = scene.killed_at(moment)
        asking.join(PATIENCE)
        assert not asking.is_alive(), moment.name
        eventually(arrived)
        eventually(lambda: shown(current) == scene.published[max(scene.published)])
        if hit:
            return
    raise AssertionError(f"{moment.name} was never met at work.")
