"""One voyage of the RL demo: islands answer, the trainer learns and publishes, islands join and leave meanwhile.

The end is judged: every island's digest against the trainer's, the engines' answers against each other, and what became
of every request.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import urllib3

from controlplane.fleet.models import Island as FleetIsland
from controlplane.fleet.services import remove, revoke_credential
from controlplane.registry.models import Run
from controlplane.registry.steering import edit_run
from scripts.demonstration import DemoError
from scripts.demonstration.crew import POLL, PROJECT, Crew, Island
from scripts.demonstration.rl.answers import Answers, body_of
from scripts.demonstration.rl.moves import Move, move_after
from scripts.demonstration.rl.show import Screen

ISLAND_DEADLINE = 180.0  # seconds until a sidecar must listen, or every island hold a version
LEAVE_DEADLINE = 60.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # several processes compute on few cores
FAULTS = {"lost": "answers were lost", "misstamped": "answers were stamped wrongly"}
PROBE = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"


class Voyage:
    """The trainer and the islands of one demo; a context manager that leaves no process behind."""

    def __init__(self, url: str, home: Path, *, model: Path, islands: int, budget: int) -> None:
        self.crew = Crew(url, home, _new_run(home))
        edit_run(_run(self.crew.run), {"staleness_versions": budget}, seen=None, actor="scripts/demo")
        self.screen = Screen()
        self.model, self.count, self.budget = model, islands, budget
        self.versions: list[dict[str, Any]] = []
        self.left: dict[str, Mapping[str, Any]] = {}  # the fleet's last word about those that are away
        self._urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the trainer and all islands but the last, which joins later."""
        try:
            options = ["--model", str(self.model.absolute()), "--budget", str(self.budget)]
            self.crew.start_trainer("scripts.demonstration.rl.trainer", options, **ONE_THREAD)
            for island in [self._start(index) for index in range(max(1, self.count - 1))]:
                self._introduce(island)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.crew.end()

    def sail(self, versions: int | None) -> dict[str, Any]:
        """Train for `versions` steps (None: until Ctrl-C), then judge; the result as `--json` writes it."""
        self._hear("version")
        while versions is None or len(self.versions) <= versions:
            self.crew.tell("step")
            # Islands come and go while the trainer is at its next step; it is not told that one leaves.
            self._move(move_after(len(self.versions) - 1, self.count))
            self._hear("version")
        self.crew.tell("end")
        end = self._hear("end")
        last = self.versions[-1]
        self._await_islands(int(last["number"]))
        alike = self._answers_alike(int(last["number"]))
        jobs = self.crew.run_jobs(int(last["number"]), [island.name for island in self.crew.islands])
        result = {
            "run": self.crew.run, "budget": self.budget, "versions": self.versions, "steps": self.versions[1:],
            "after": {key: end[key] for key in ("samples", "reward", "ended", "example")},
            "counts": end["counts"], "islands": self._judged(), "alike": alike, "jobs": jobs,
        }  # fmt: skip
        result["wrong"] = _wrong(result)
        self.screen.summary(result)
        return result

    # -- the trainer

    def _hear(self, event: str) -> dict[str, Any]:
        """The trainer's next line of this kind; progress is shown meanwhile."""
        while (said := self.crew.heard())["event"] != event:
            fleet = self.crew.fleet()
            self.screen.status(said, {i.name: fleet.get(i.name, {}).get("version") for i in self.crew.islands})
        if event == "version":
            self.versions.append(said)
            self.screen.version(said)
        return said

    # -- islands

    def _move(self, move: Move | None) -> None:
        if move is None:
            return
        if move.joins:
            self._join(move.index)
        else:
            self._leave(next(i for i in self.crew.islands if i.folder == self.crew.folder(move.index)))

    def _start(self, index: int) -> Island:
        # It begins to listen at once and refuses politely until it holds a version.
        options = ["--engine", "local", "--listen", "127.0.0.1:0"]
        return self.crew.start_island(index, "local", options, **ONE_THREAD)

    def _introduce(self, island: Island) -> None:
        self._urls[island.name] = self._address(island)
        self.crew.tell(f"island {island.name} {self._urls[island.name]}")

    def _join(self, index: int) -> None:
        island = self._start(index)
        again = self.left.pop(island.name, None)
        was = f"; it held v{again['version']} when it left" if again else ""
        self.screen.line(f"      + {island.name} {'comes back' if again else 'joins'}{was}")
        self._introduce(island)

    def _leave(self, island: Island) -> None:
        self.screen.line(f"      - {island.name} leaves, and nobody told the trainer")
        self.crew.dismiss(island, LEAVE_DEADLINE)
        self.left[island.name] = self.crew.rows()[island.name]

    def _address(self, island: Island) -> str:
        """Where its sidecar listens, from what it says in its log."""
        deadline = time.monotonic() + ISLAND_DEADLINE
        while time.monotonic() < deadline:
            self.crew.check_alive()
            said = island.log.read_bytes()[island.log_from :].decode(errors="replace")
            if found := re.search(r"sidecar listens on (http://[^\s,]+)", said):
                return found[1]
            time.sleep(POLL)
        raise DemoError(f"{island.name} does not listen after {ISLAND_DEADLINE:.0f} s; see {island.log}")

    def _await_islands(self, number: int) -> None:
        deadline = time.monotonic() + ISLAND_DEADLINE
        while True:
            self.crew.check_alive()
            fleet = self.crew.fleet()
            late = [i.name for i in self.crew.islands if fleet.get(i.name, {}).get("version") != number]
            if not late:
                return
            if time.monotonic() > deadline:
                raise DemoError(f"after {ISLAND_DEADLINE:.0f} s version {number} is not on {', '.join(late)}")
            time.sleep(POLL)

    def _answers_alike(self, number: int) -> bool:
        """Whether all engines' likeliest answer and its log probabilities are the same, bit by bit."""
        pool, found = urllib3.PoolManager(), []
        for island in self.crew.islands:
            body = body_of([], samples=1, exact=number) | {"prompt": PROBE}
            answer = pool.request("POST", f"{self._urls[island.name]}/v1/completions", json=body, timeout=60)
            found.append(Answers.parse(answer.status, answer.data))
        return all(answers == found[0] for answers in found)

    def _judged(self) -> list[dict[str, Any]]:
        """Each island's claim against the trainer's digest of that version; those that left, as they left."""
        digests = {version["number"]: version["digest"] for version in self.versions}
        fleet = self.crew.rows()
        rows = [(i.name, fleet[i.name], True) for i in self.crew.islands]
        rows += [(name, row, False) for name, row in self.left.items()]
        return [
            {
                "name": name, "version": row["version"], "digest": row["claimed"]["digest"], "here": here,
                "identical": row["claimed"]["digest"] == digests.get(row["version"]),
            }
            for name, row, here in sorted(rows, key=lambda it: it[0])
        ]  # fmt: skip


def _run(name: str) -> Run:
    return Run.objects.get(project__slug=PROJECT, name=name)


def _wrong(result: Mapping[str, Any]) -> list[str]:
    """What must not happen beside bytes that differ, in words."""
    counts = result["counts"]
    found = [f"{counts[key]} {words}" for key, words in FAULTS.items() if counts[key]]
    return found if result["alike"] else [*found, "engines with the same weights answer differently"]


def _new_run(home: Path) -> str:
    """A run of its own for each start; the islands of the one before, which are gone, leave the fleet."""
    for island in FleetIsland.objects.filter(project__slug=PROJECT):
        remove(revoke_credential(island, actor="scripts/demo"), actor="scripts/demo")
    shutil.rmtree(home / "islands", ignore_errors=True)
    return f"smollm2-{Run.objects.filter(project__slug=PROJECT).count() + 1}"
