"""One voyage of the demo: the trainer publishes, islands follow, and what they hold is compared with what was sent.

It talks to the control plane as its users do: the REST client for an operator, `mailboat island run` for the islands,
`Publisher` for the trainer. It must never read an island's or the server's files, save the exports that it judges.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from controlplane.accounts.models import Token
from controlplane.accounts.services import create_token, revoke_token
from controlplane.registry.models import Project
from mailboat.client import Api
from mailboat.errors import MailboatError
from scripts.demonstration import DemoError
from scripts.demonstration.judge import differences

PROJECT, RUN = "demo", "minilm"
PLACES = (("Aurora", "eu-north"), ("Borealis", "us-west"), ("Cirrus", "ap-south"), ("Drift", "sa-east"))
ISLAND_DEADLINE = 120.0  # seconds until every island must hold a version
JOB_DEADLINE = 120.0
POLL = 0.1


@dataclass
class Island:
    """One island process and where it exports complete checkpoints."""

    name: str
    process: subprocess.Popen[bytes]
    export: Path
    identical: bool = True


class Voyage:
    """The trainer and the islands of one demo; a context manager that leaves no process behind."""

    def __init__(self, url: str, home: Path, *, islands: int, links: tuple[float, ...] | None) -> None:
        self.url, self.home, self.count, self.links = url, home, islands, links
        self.islands: list[Island] = []
        self.trainer: subprocess.Popen[str] | None = None
        self.results: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        """Start the trainer and the islands."""
        try:
            project = Project.objects.get(slug=PROJECT)
            self.api = Api(self.url, PROJECT, self._token(project, "operator"))
            self.api.create_run(RUN)
            # The trainer needs seconds to load its model; the islands start meanwhile.
            self.trainer = self._start_trainer(self._token(project, "publisher"))
            self.islands = [self._start_island(i) for i in range(self.count)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process: politely, then not."""
        processes: list[subprocess.Popen[Any]] = [i.process for i in self.islands]
        if self.trainer is not None:
            processes.append(self.trainer)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def sail(self, versions: int | None) -> dict[str, Any]:
        """Publish `versions` patches (None: until Ctrl-C), then run the jobs; the result as `--json` writes it."""
        first = self._published()
        names = "  ".join(f"{i.name:>18}" for i in self.islands)
        print(f"{'version':>8} {'step':>5} {'patch':>12} {'of full':>9} {'changed':>9}   {names}")
        if "continues" in first:
            print(f"{first['continues']:>8}       continues from here")
        else:
            self._follow(first)
        published = 0
        while versions is None or published < versions:
            self._ask_trainer()
            self._follow(self._published())
            published += 1
        jobs = self._run_jobs()
        fleet = {row["name"]: row for row in self.api.fleet()["islands"]}
        return {
            "versions": self.results,
            "islands": [
                {
                    "name": island.name,
                    "version": fleet[island.name]["version"],
                    "digest": fleet[island.name]["claimed"]["digest"],
                    "identical": island.identical,
                }
                for island in self.islands
            ],
            "jobs": jobs,
        }

    # -- processes

    def _token(self, project: Project, role: str) -> str:
        """A token of this start; the one before is revoked, so that no demo leaves a growing pile of keys."""
        name = f"demo {role}"
        for old in Token.objects.filter(project=project, role=role, name=name, revoked_at=None):
            revoke_token(old, actor="scripts/demo")
        return create_token(project, role, name, actor="scripts/demo")[1]

    def _start_trainer(self, token: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "scripts.demonstration.trainer", "--server", self.url, "--project", PROJECT]
        command += ["--run", RUN, "--folder", str(self.home / "trainer")]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log("trainer"), text=True,
            env=os.environ | {"MAILBOAT_TOKEN": token, "OMP_WAIT_POLICY": "passive"}, start_new_session=True,
        )  # fmt: skip

    def _start_island(self, index: int) -> Island:
        provider, region = PLACES[index % len(PLACES)]
        name = f"{provider.lower()}-{index + 1}"
        folder = self.home / "islands" / name
        store = folder / "store"
        command = [str(Path(sys.executable).parent / "mailboat"), "island", "run", "--server", self.url]
        command += ["--project", PROJECT, "--store", str(store), "--export", str(folder / "export")]
        if not (store / "credential.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            about = {"channel": "latest", "provider": provider, "region": region, "engine": "checkpoint"}
            command += ["--token", str(self.api.create_enrolment_token(RUN, name, **about)["token"])]
        if self.links:
            command += ["--link-mbit", str(self.links[index % len(self.links)])]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log(name), stderr=subprocess.STDOUT, start_new_session=True
        )
        return Island(name, process, folder / "export")

    def _log(self, name: str) -> IO[bytes]:
        folder = self.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{name}.log").open("ab")

    def _check_alive(self) -> None:
        for name, process in [("trainer", self.trainer), *((i.name, i.process) for i in self.islands)]:
            if process is not None and process.poll() is not None:
                log = self.home / "logs" / f"{name}.log"
                raise DemoError(f"{name} ended with status {process.returncode}; see {log}")

    # -- one version

    def _ask_trainer(self) -> None:
        assert self.trainer is not None and self.trainer.stdin is not None
        try:
            self.trainer.stdin.write("next\n")
            self.trainer.stdin.flush()
        except BrokenPipeError:
            self._check_alive()
            raise

    def _published(self) -> dict[str, Any]:
        """The trainer's next line."""
        assert self.trainer is not None and self.trainer.stdout is not None
        while not select.select([self.trainer.stdout], [], [], 1.0)[0]:
            self._check_alive()
        line = self.trainer.stdout.readline()
        if not line:
            self.trainer.wait()
            self._check_alive()
        version: dict[str, Any] = json.loads(line)
        return version

    def _follow(self, version: Mapping[str, Any]) -> None:
        """Wait until every island reports the version, compare its bytes, print a line."""
        number = int(version["number"])
        print(_facts(version), end="", flush=True)
        seconds = self._await_islands(number, float(version["ready_at"]))
        same = {island.name: self._judge(island, version) for island in self.islands}
        cells = (f"{seconds[i.name]:.2f} s {'identical' if same[i.name] else 'DIFFERENT'}" for i in self.islands)
        print("   " + "  ".join(f"{cell:>18}" for cell in cells), flush=True)
        keys = ("number", "digest", "patch_bytes", "full_bytes", "changed", "elements")
        self.results.append({key: version[key] for key in keys} | {"identical": all(same.values())})

    def _await_islands(self, number: int, ready_at: float) -> dict[str, float]:
        """Seconds from the version's readiness until each island reported it as verified."""
        seconds: dict[str, float] = {}
        deadline = time.monotonic() + ISLAND_DEADLINE
        while len(seconds) < len(self.islands):
            self._check_alive()
            for row in self._fleet():
                if row["version"] is not None and row["version"] >= number:
                    seconds.setdefault(str(row["name"]), max(0.0, time.time() - ready_at))
            if time.monotonic() > deadline:
                names = ", ".join(i.name for i in self.islands if i.name not in seconds)
                logs = self.home / "logs"
                raise DemoError(f"after {ISLAND_DEADLINE:.0f} s version {number} is not on {names}; see {logs}")
            time.sleep(POLL)
        return seconds

    def _fleet(self) -> list[Mapping[str, Any]]:
        try:
            return list(self.api.fleet()["islands"])
        except MailboatError:
            return []  # the server may be restarting; the deadline bounds the patience

    def _judge(self, island: Island, version: Mapping[str, Any]) -> bool:
        found = differences(Path(version["own"]), island.export / f"v{version['number']:06d}")
        for sentence in found[:5]:
            print(f"\n{island.name}: {sentence}", file=sys.stderr)
        island.identical = island.identical and not found
        return not found

    # -- jobs

    def _run_jobs(self) -> list[dict[str, str]]:
        """One replay of the newest version and one verify per island."""
        ids = {str(row["name"]): row["id"] for row in self.api.fleet()["islands"]}
        jobs = [self.api.create_job("replay", run=RUN, version=self.results[-1]["number"])]
        jobs += [self.api.create_job("verify", island=ids[i.name]) for i in self.islands]
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


def _facts(version: Mapping[str, Any]) -> str:
    """Number, step, patch size, its share of the checkpoint, density."""
    patch, changed = version["patch_bytes"], version["changed"]
    if patch is None:
        return f"{version['number']:>8} {version['step']:>5} {'anchor':>12} {'':>9} {'':>9}"
    share, density = patch / version["full_bytes"], changed / version["elements"]
    return f"{version['number']:>8} {version['step']:>5} {_size(patch):>12} {share:>9.3%} {density:>9.3%}"


def _size(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.2f} MiB"
