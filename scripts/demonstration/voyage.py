"""One voyage of the demo: the trainer publishes, islands follow, and what they hold is compared with what was sent.

It talks to the control plane as its users do: the REST client for an operator, `mailboat island run` for the islands,
`Publisher` for the trainer. It must never read an island's or the server's files, save the exports that it judges.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mailboat.sizes import size
from scripts.demonstration import DemoError
from scripts.demonstration.crew import POLL, Crew, Island
from scripts.demonstration.judge import differences

RUN = "minilm"
ISLAND_DEADLINE = 120.0  # seconds until every island must hold a version


class Voyage:
    """The trainer and the islands of one demo; a context manager that leaves no process behind."""

    def __init__(self, url: str, home: Path, *, islands: int, links: tuple[float, ...] | None) -> None:
        self.crew = Crew(url, home, RUN)
        self.count, self.links = islands, links
        self.results: list[dict[str, Any]] = []

    @property
    def islands(self) -> list[Island]:
        """Its islands."""
        return self.crew.islands

    def __enter__(self) -> Self:
        """Start the trainer and the islands."""
        try:
            # The trainer needs seconds to load its model; the islands start meanwhile.
            self.crew.start_trainer("scripts.demonstration.trainer")
            for index in range(self.count):
                self._start_island(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every process."""
        self.crew.end()

    def sail(self, versions: int | None) -> dict[str, Any]:
        """Publish `versions` patches (None: until Ctrl-C), then run the jobs; the result as `--json` writes it."""
        first = self.crew.heard()
        names = "  ".join(f"{i.name:>18}" for i in self.islands)
        print(f"{'version':>8} {'step':>5} {'patch':>12} {'of full':>9} {'changed':>9}   {names}")
        if "continues" in first:
            print(f"{first['continues']:>8}       continues from here")
        else:
            self._follow(first)
        published = 0
        while versions is None or published < versions:
            self.crew.tell("next")
            self._follow(self.crew.heard())
            published += 1
        jobs = self.crew.run_jobs(self.results[-1]["number"], [island.name for island in self.islands])
        fleet = self.crew.rows()
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

    def _start_island(self, index: int) -> None:
        options = ["--export", str(self.crew.folder(index) / "export")]
        if self.links:
            options += ["--link-mbit", str(self.links[index % len(self.links)])]
        self.crew.start_island(index, "checkpoint", options)

    # -- one version

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
            self.crew.check_alive()
            for name, row in self.crew.fleet().items():
                if row["version"] is not None and row["version"] >= number:
                    seconds.setdefault(name, max(0.0, time.time() - ready_at))
            if time.monotonic() > deadline:
                names = ", ".join(i.name for i in self.islands if i.name not in seconds)
                logs = self.crew.home / "logs"
                raise DemoError(f"after {ISLAND_DEADLINE:.0f} s version {number} is not on {names}; see {logs}")
            time.sleep(POLL)
        return seconds

    def _judge(self, island: Island, version: Mapping[str, Any]) -> bool:
        found = differences(Path(version["own"]), island.export / f"v{version['number']:06d}")
        for sentence in found[:5]:
            print(f"\n{island.name}: {sentence}", file=sys.stderr)
        island.identical = island.identical and not found
        return not found


def _facts(version: Mapping[str, Any]) -> str:
    """Number, step, patch size, its share of the checkpoint, density."""
    patch, changed = version["patch_bytes"], version["changed"]
    if patch is None:
        return f"{version['number']:>8} {version['step']:>5} {'anchor':>12} {'':>9} {'':>9}"
    share, density = patch / version["full_bytes"], changed / version["elements"]
    return f"{version['number']:>8} {version['step']:>5} {size(patch):>12} {share:>9.3%} {density:>9.3%}"
