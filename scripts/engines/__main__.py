"""Runs everything: versions under load by way A and way B, a backlog, a kill in a commit, and fresh starts to compare.

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


def way(name: str, python: Path, checkpoint: Path, work: Path, versions: int) -> dict[str, Any]:
    """One way through all versions; the engine is killed in the last commit and starts again."""
    rig, log = Rig(checkpoint, work / name), work / f"vllm-{name}.log"
    lines: list[str] = []
    served = work / name / "served"
    shutil.copytree(checkpoint, served)  # what the engine starts from stays the first version
    engine = Vllm(python, served, log, extension=name == "b")
    sidecar = None
    try:
        engine.wait()
        sidecar = front(engine.url, lines)
        assert sidecar.url and sidecar._metrics
        sidecar.engine.load(rig.image, rig.applied())
        say(f"way {name}: {lines[-1]}")
        pauses = []
        with Load(sidecar.url, rig) as load:
            load.wait(2)
            for _ in range(versions):
                rig.step(sidecar)
                pauses.append(sidecar._metrics.last_pause)
                say(f"way {name}: version {rig.number}, paused {pauses[-1]:.3f} s, {load.finished} streams ended")
                sidecar.engine.audit(rig.image)
                load.wait(2)
        backlog(load, lambda: rig.step(sidecar))
        at_rest = greedy(sidecar.url)
        killed = kill_in_commit(engine, rig, sidecar)
        engine = Vllm(python, served, log, extension=name == "b", port=engine.port)
        engine.wait()
        wait_for_health(sidecar, rig)
        after_kill = greedy(sidecar.url)
        say(f"way {name}: {len(load.problems)} problems {load.problems[:2]}")
    finally:
        engine.kill()
        if sidecar is not None:
            sidecar.close()
    fresh = Vllm(python, rig.image.folder, log, extension=False)
    try:
        fresh.wait()
        expected = greedy(fresh.url)
    finally:
        fresh.kill()
    identical = {"after_kill": after_kill == expected, "killed_was_fenced": killed}
    if not identical["after_kill"]:
        say(f"way {name}: expected {expected}, found {after_kill}")
    return {
        "pause_s": round(median(pauses), 4), "lost": load.lost, "misstamped": load.misstamped, "identical": identical,
        "at_rest": at_rest, "log": lines, "rig": rig,
    }  # fmt: skip


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
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        found = {name: way(name, python, checkpoint, Path(folder), options.versions) for name in options.ways}
    identical = all(all(result["identical"].values()) for result in found.values())
    if len(found) == 2:  # the same versions by both ways, before the kill
        identical = identical and found["a"]["at_rest"] == found["b"]["at_rest"]
    figures = {
        "versions": options.versions,
        "identical": identical,
        "lost": sum(result["lost"] for result in found.values()),
        "misstamped": sum(result["misstamped"] for result in found.values()),
        "pause_way_a_s": found["a"]["pause_s"] if "a" in found else None,
        "pause_way_b_s": found["b"]["pause_s"] if "b" in found else None,
    }
    if not options.json:
        for name, result in found.items():
            say(f"way {name}: {result['identical']}")
    print(json.dumps(figures))
    return 0 if identical and not figures["lost"] and not figures["misstamped"] else 1


if __name__ == "__main__":
    sys.exit(main())
