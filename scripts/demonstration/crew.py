"""The processes of a demo: one trainer and its islands, their logs, and their end.

It starts them as users would: a trainer with a publisher's token and a signing key, islands by `mailboat island run`
with a one-time enrolment token and the trainer's public key. No process outlives it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from controlplane.accounts.models import Token
from controlplane.accounts.services import create_token, revoke_token
from controlplane.registry.models import Project
from mailboat.client import Api
from mailboat.errors import MailboatError
from mailboat.signing import read_public, write_key
from scripts.demonstration import DemoError

PROJECT = "demo"
PLACES = (("Aurora", "eu-north"), ("Borealis", "us-west"), ("Cirrus", "ap-south"), ("Drift", "sa-east"))
JOB_DEADLINE = 120.0
END_SECONDS = 10.0
POLL = 0.1


@dataclass
class Island:
    """One island process, its folder and its log."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    log_from: int  # where this start's lines begin in it
    identical: bool = True

    @property
    def export(self) -> Path:
        """Where it may leave complete checkpoints."""
        return self.folder / "export"


class Crew:
    """Starts, watches and ends the processes of one demo."""

    def __init__(self, url: str, home: Path, run: str) -> None:
        self.url, self.home, self.run = url, home, run
        self.islands: list[Island] = []
        self._trainer: subprocess.Popen[str] | None = None
        project = Project.objects.get(slug=PROJECT)
        self._publisher = _token(project, "publisher")
        self.api = Api(url, PROJECT, _token(project, "operator"))
        self.api.create_run(run)
        self._key = self._signing_key()

    def end(self) -> None:
        """End every process: politely, then not."""
        processes: list[subprocess.Popen[Any]] = [island.process for island in self.islands]
        if self._trainer is not None:
            processes.append(self._trainer)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check_alive(self) -> None:
        """Raises DemoError when a process has ended by itself."""
        for name, process in [("trainer", self._trainer), *((i.name, i.process) for i in self.islands)]:
            if process is not None and process.poll() is not None:
                log = self.home / "logs" / f"{name}.log"
                raise DemoError(f"{name} ended with status {process.returncode}; see {log}")

    # -- the trainer

    def start_trainer(self, module: str, arguments: Sequence[str] = (), **environment: str) -> None:
        """Run a module that speaks the trainer's line protocol."""
        command = [sys.executable, "-m", module, "--server", self.url, "--project", PROJECT]
        command += ["--run", self.run, "--folder", str(self.home / "trainer"), *arguments]
        given = {"MAILBOAT_TOKEN": self._publisher, "OMP_WAIT_POLICY": "passive"}
        given |= {} if self._key is None else {"MAILBOAT_SIGNING_KEY": str(self._key)}
        self._trainer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log("trainer"), text=True,
            env=os.environ | given | environment,
            start_new_session=True,
        )  # fmt: skip

    def _signing_key(self) -> Path | None:
        """The trainer's key, made and registered with a new run; None for a run that an older demo began unsigned."""
        key = self.home / f"{self.run}.pem"
        if not key.exists():
            if self.api.newest_version(self.run) is not None:
                return None
            write_key(key)
        self.api.register_key(self.run, read_public(f"{key}.pub"), "demo trainer")
        return key

    def tell(self, line: str) -> None:
        """One line to the trainer."""
        assert self._trainer is not None and self._trainer.stdin is not None
        try:
            self._trainer.stdin.write(line + "\n")
            self._trainer.stdin.flush()
        except BrokenPipeError:
            self.check_alive()
            raise

    def heard(self) -> dict[str, Any]:
        """The trainer's next line."""
        assert self._trainer is not None and self._trainer.stdout is not None
        while not select.select([self._trainer.stdout], [], [], 1.0)[0]:
            self.check_alive()
        line = self._trainer.stdout.readline()
        if not line:
            self._trainer.wait()
            self.check_alive()
        said: dict[str, Any] = json.loads(line)
        return said

    # -- islands

    def folder(self, index: int) -> Path:
        """Where everything of the island of this index lies."""
        return self.home / "islands" / _name(index)

    def start_island(self, index: int, engine: str, options: Sequence[str] = (), **environment: str) -> Island:
        """Run the island of this index: the first time with a token, then from what it left."""
        name, folder = _name(index), self.folder(index)
        store = folder / "store"
        command = [str(Path(sys.executable).parent / "mailboat"), "island", "run", "--server", self.url]
        command += ["--project", PROJECT, "--store", str(store), *options]
        command += [] if self._key is None else ["--publisher-key", f"{self._key}.pub"]
        if not (store / "credential.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            provider, region = PLACES[index % len(PLACES)]
            about = {"channel": "latest", "provider": provider, "region": region, "engine": engine}
            command += ["--token", str(self.api.create_enrolment_token(self.run, name, **about)["token"])]
        log = self._log(name)
        log_from = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
        island = Island(name, process, folder, Path(log.name), log_from)
        self.islands.append(island)
        return island

    def dismiss(self, island: Island, seconds: float) -> None:
        """Let an island go: it ends what it has begun. Raises DemoError when it does not, or not well."""
        island.process.send_signal(signal.SIGTERM)
        try:
            status = island.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{island.name} has not ended after {seconds:.0f} s; see {island.log}") from None
        if status:
            raise DemoError(f"{island.name} ended with status {status}; see {island.log}")
        self.islands.remove(island)

    def rows(self) -> dict[str, Mapping[str, Any]]:
        """The fleet's rows by name."""
        return {str(row["name"]): row for row in self.api.fleet()["islands"]}

    def fleet(self) -> dict[str, Mapping[str, Any]]:
        """The same; empty while the server does not answer, which the callers' deadlines bound."""
        try:
            return self.rows()
        except MailboatError:
            return {}

    # -- jobs

    def run_jobs(self, version: int, islands: Sequence[str]) -> list[dict[str, str]]:
        """One replay of a version and one verify per island; each with its end."""
        ids = {str(row["name"]): row["id"] for row in self.api.fleet()["islands"]}
        jobs = [self.api.create_job("replay", run=self.run, version=version)]
        jobs += [self.api.create_job("verify", island=ids[name]) for name in islands]
        return [self._finished(str(job["id"])) for job in jobs]

    def _finished(self, job: str) -> dict[str, str]:
        deadline = time.monotonic() + JOB_DEADLINE
        shown = ""
        while True:
            row = self.api.job(job)
            state = str(row["state"])
            if state != shown:
                why = f": {row['error']}" if row.get("error") else ""
                print(f"{'job':>8} {row['kind']:<8} {state}{why}", flush=True)
                shown = state
            if state in {"succeeded", "failed", "cancelled"} or time.monotonic() > deadline:
                return {"kind": str(row["kind"]), "state": state}
            time.sleep(POLL)

    def _log(self, name: str) -> IO[bytes]:
        folder = self.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{name}.log").open("ab")


def _name(index: int) -> str:
    return f"{PLACES[index % len(PLACES)][0].lower()}-{index + 1}"


def _token(project: Project, role: str) -> str:
    """A token of this start; the one before is revoked, so that no demo leaves a growing pile of keys."""
    name = f"demo {role}"
    for old in Token.objects.filter(project=project, role=role, name=name, revoked_at=None):
        revoke_token(old, actor="scripts/demo")
    return create_token(project, role, name, actor="scripts/demo")[1]
