"""Runs everything: versions under load by way A and way B, a backlog, sleep, a kill in a commit, and fresh starts to
compare.

Before each commit the engine answers the very prompts that are compared afterwards, so that its prefix cache holds
their keys by older weights. What it answers at rest after the last version, and again after it was killed and came
back, must equal what a vLLM answers that was started on those bytes: tokens and logprobs, bit for bit.

The last line is JSON: versions, identical, lost, misstamped, pause_way_a_s, pause_way_b_s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import urllib3

from mailboat.errors import MailboatError
from scripts.engines.install import environment, model
from scripts.engines.rig import PROMPTS, Load, Rig, front, greedy
from scripts.engines.vllm_process import Vllm

HOME = Path(__file__).resolve().parents[2] / "var" / "engines"


def say(line: str) -> None:
    """For people, beside the JSON."""
    print(f"engines: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Answers:
    """What an engine answered while it held the bytes of a folder."""

    digest: str
    folder: Path
    said: list[Any]

    @classmethod
    def ask(cls, url: str, rig: Rig, folder: Path) -> Answers:
        """Asks, and keeps the bytes."""
        said = greedy(url)
        shutil.copytree(rig.image.folder, folder)
        return cls(rig.image.digest, folder, said)


@dataclass(frozen=True)
class Way:
    """What came of one way. ``cached``: prompt tokens that the engine took from its prefix cache."""

    pause: float
    load: Load
    at_rest: Answers
    after_kill: Answers
    cached: float
    slept: bool
    fenced: bool

    @property
    def sound(self) -> bool:
        """Whether sleep and kill were fenced, and the prefix cache was used at all, so that it could have leaked."""
        return self.slept and self.fenced and self.cached > 0


def way(name: str, python: Path, checkpoint: Path, work: Path, versions: int) -> Way:
    """One way through all versions; the engine is killed in the last commit and starts again."""
    rig, log = Rig(checkpoint, work / name), work / f"vllm-{name}.log"
    served = work / name / "served"
    shutil.copytree(checkpoint, served)  # what the engine starts from stays the first version
    engine = Vllm(python, served, log, extension=name == "b")
    sidecar = None
    try:
        engine.wait()
        sidecar = front(engine.url, lambda line: say(f"way {name}: {line}"))
        assert sidecar.url and sidecar._metrics
        sidecar.engine.load(rig.image, rig.applied())
        pauses = []
        with Load(sidecar.url, rig) as load:
            load.wait(2)
            for _ in range(versions):
                greedy(sidecar.url)
                rig.step(sidecar)
                pauses.append(sidecar._metrics.last_pause)
                say(f"way {name}: version {rig.number}, paused {pauses[-1]:.3f} s, {load.finished} streams ended")
                sidecar.engine.audit(rig.image)
                load.wait(2)
        backlog(load, lambda: rig.step(sidecar))
        at_rest = Answers.ask(sidecar.url, rig, work / name / "at-rest")
        greedy(sidecar.url)  # once more: now the prompts are in the cache by these weights
        cached = engine.cached_tokens()
        slept = sleeps_and_wakes(engine.url, sidecar.url)
        fenced = kill_in_commit(engine, rig, sidecar)
        engine = Vllm(python, served, log, extension=name == "b", port=engine.port)
        engine.wait()
        wait_for_health(sidecar, rig)
        after_kill = Answers.ask(sidecar.url, rig, work / name / "after-kill")
        say(f"way {name}: {len(load.problems)} problems {load.problems[:2]}, {cached:.0f} prompt tokens from its cache")
    finally:
        engine.kill()
        if sidecar is not None:
            sidecar.close()
    rig.image.close()
    return Way(median(pauses), load, at_rest, after_kill, cached, slept, fenced)


def equal_fresh_starts(python: Path, work: Path, found: list[Answers]) -> bool:
    """Whether all answers are those of a vLLM that was started on the same bytes: one start for each version."""
    equal, expected = True, dict[str, list[Any]]()
    for answers in found:
        if answers.digest not in expected:
            fresh = Vllm(python, answers.folder, work / "vllm-fresh.log", extension=False)
            try:
                fresh.wait()
                expected[answers.digest] = greedy(fresh.url)
            finally:
                fresh.kill()
        if answers.said != expected[answers.digest]:
            wrong = [pair for pair in zip(expected[answers.digest], answers.said, strict=True) if pair[0] != pair[1]]
            say(f"{answers.folder.name}: {len(wrong)} of {len(answers.said)} differ; expected and found {wrong[0]}")
            equal = False
    return equal


def backlog(load: Load, step: Any) -> None:
    """A commit under a backlog deeper than the running batch of eight."""
    threads = [
        threading.Thread(target=load.one, args=(urllib3.PoolManager(), f"Backlog {number}: {PROMPTS[0]}"))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1)
    step()
    for thread in threads:
        thread.join(300)


def sleeps_and_wakes(engine: str, sidecar: str) -> bool:
    """Puts the engine to sleep and wakes it (on CPUs its memory stays where it is): no traffic meanwhile."""

    def healthy(wanted: int) -> bool:
        until = time.monotonic() + 60
        while (answer := urllib3.request("GET", f"{sidecar}/health", timeout=10)).status != wanted:
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return wanted == 200 or b"sleeps" in answer.data

    urllib3.request("POST", f"{engine}/sleep?level=1", timeout=60)
    slept = healthy(503)
    urllib3.request("POST", f"{engine}/wake_up", timeout=60)
    return healthy(200) and slept


def kill_in_commit(engine: Vllm, rig: Rig, sidecar: Any) -> bool:
    """Kills the engine while a version is committed; whether the sidecar then gives it no traffic."""
    try:
        rig.step(sidecar, threading.Timer(0.1, engine.kill).start)
    except MailboatError as error:
        say(f"the killed commit: {error}")
    engine.kill()
    time.sleep(2)
    answer = urllib3.PoolManager().request("POST", f"{sidecar.url}/v1/completions", json={"prompt": "x"}, timeout=30)
    return answer.status == 503


def wait_for_health(sidecar: Any, rig: Rig) -> None:
    """Until the engine that came back holds what the image holds."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if urllib3.PoolManager().request("GET", f"{sidecar.url}/health", timeout=10).status == 200:
            return
        try:
            sidecar.engine.load(rig.image, rig.applied())
        except MailboatError:
            time.sleep(1)
    raise RuntimeError("the engine did not come back")


def main() -> int:
    """Prints the figures; 1 when something was lost, stamped wrongly or not identical."""
    parser = argparse.ArgumentParser(prog="scripts/test-engines", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on standard output")
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--ways", default="ab", choices=["a", "b", "ab"])
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    python = environment(HOME)
    checkpoint = model(HOME, python)
    with tempfile.TemporaryDirectory(dir=HOME) as name:
        work = Path(name)
        ways = {name: way(name, python, checkpoint, work, options.versions) for name in options.ways}
        found = list(ways.values())
        rested, woken = [one.at_rest for one in found], [one.after_kill for one in found]
        equal = equal_fresh_starts(python, work, rested + woken)
    if len({answers.digest for answers in rested}) > 1:
        say("the ways do not hold the same bytes at rest")
        equal = False
    figures = {
        "versions": options.versions,
        "identical": equal and all(one.sound for one in found),
        "lost": sum(one.load.lost for one in found),
        "misstamped": sum(one.load.misstamped for one in found),
        "pause_way_a_s": round(ways["a"].pause, 4) if "a" in ways else None,
        "pause_way_b_s": round(ways["b"].pause, 4) if "b" in ways else None,
    }
    if not options.json:
        say(f"as freshly started: {equal}; fenced and cached: {[one.sound for one in found]}")
    print(json.dumps(figures))
    return 0 if figures["identical"] and not figures["lost"] and not figures["misstamped"] else 1


if __name__ == "__main__":
    sys.exit(main())
