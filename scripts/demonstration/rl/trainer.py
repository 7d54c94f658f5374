"""The trainer process: takes answers from islands, learns, publishes.

Line protocol on standard input: `island NAME URL` (ask it, at once), `step` (learn from the next batch, publish), `end`
(look at what the newest version answers, say what became of everything). Standard output: one JSON object per line with
an `event`: `version` (a published one; the anchor's comes by itself), `end`, and once a second `progress`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mailboat.errors import MailboatError
from mailboat.trainer.publisher import Publisher
from scripts.demonstration.rl.rollouts import NoAnswers, Rollouts

if TYPE_CHECKING:
    from scripts.demonstration.rl.grpo import Group
    from scripts.demonstration.rl.learner import Learner

GROUPS, SAMPLES = 6, 8  # questions of a batch, answers to each
AHEAD = 8  # groups that may wait or be under way: the next batch, and what is at hand when one comes slowly


class Trainer:
    """Learner, publisher and rollouts, wired together."""

    def __init__(self, learner: Learner, publisher: Publisher, folder: Path, budget: int) -> None:
        self.learner, self.publisher = learner, publisher
        self.rollouts = Rollouts(learner.encode, samples=SAMPLES, budget=budget, ahead=AHEAD)
        self.doing = "publishing"
        self._side_files = learner.side_files(folder)
        self._said = threading.Lock()

    def say(self, event: str, **facts: Any) -> None:
        """One line."""
        with self._said:
            print(json.dumps({"event": event} | facts), flush=True)

    def anchor(self) -> None:
        """Version 0: what the model is before it learns."""
        version = self.publisher.publish(self.learner.served, step=0, side_files=self._side_files)
        self.learner.version = version.number
        self.say("version", number=version.number, digest=version.digest, full_bytes=version.full_bytes)

    def step(self) -> None:
        """One batch, one optimiser step, one version."""
        begun = time.monotonic()
        self.doing = "waiting for answers"
        groups = self.rollouts.take(GROUPS)
        waited = time.monotonic()
        self.doing = "learning"
        base = self.learner.version
        step = self.learner.step(groups)
        learnt = time.monotonic()
        self.doing = "publishing"
        number = base + 1
        self.rollouts.announce(number)
        version = self.publisher.publish(self.learner.served, step=number)
        assert version.number == number  # one publisher, one run
        self.learner.version = number
        self.rollouts.published(number)
        self.say(
            "version", number=number, digest=version.digest, patch_bytes=version.patch_bytes, changed=version.changed,
            elements=version.elements, full_bytes=version.full_bytes, seconds={
                "waiting": waited - begun, "learning": learnt - waited, "publishing": time.monotonic() - learnt,
            }, **_looked_at(groups), **_staleness(groups, base), **asdict(step),
        )  # fmt: skip

    def end(self) -> None:
        """What the newest version answers, and the counts."""
        self.doing = "asking the newest version"
        groups = self.rollouts.take_newest(GROUPS)
        self.rollouts.close()
        self.say("end", counts=vars(self.rollouts.counts), **_looked_at(groups))

    def tell_progress(self) -> None:
        """Once a second, until the process ends."""
        while True:
            self.say("progress", doing=self.doing, version=self.learner.version, **self.rollouts.progress())
            time.sleep(1)


def _looked_at(groups: Sequence[Group]) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group.samples]
    best = max(samples, key=lambda sample: sample.reward)
    return {
        "samples": len(samples),
        "reward": sum(sample.reward for sample in samples) / len(samples),
        "ended": sum(sample.ended for sample in samples) / len(samples),
        "example": best.text.strip(),
    }


def _staleness(groups: Sequence[Group], version: int) -> dict[str, Any]:
    found: dict[int, int] = {}
    for group in groups:
        found[version - group.oldest] = found.get(version - group.oldest, 0) + len(group.samples)
    return {"staleness": dict(sorted(found.items()))}


def main() -> int:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("--server", "--project", "--run"):
        parser.add_argument(name, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budget", type=int, required=True)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        _serve(arguments)
    except (MailboatError, NoAnswers) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    from scripts.demonstration.rl.learner import Learner

    learner = Learner(arguments.model)
    token = os.environ["MAILBOAT_TOKEN"]
    with Publisher(arguments.server, arguments.project, arguments.run, token) as publisher:
        trainer = Trainer(learner, publisher, arguments.model, arguments.budget)
        trainer.anchor()
        threading.Thread(target=trainer.tell_progress, daemon=True).start()
        orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(trainer, orders), daemon=True).start()
        while order := orders.get():
            {"step": trainer.step, "end": trainer.end}[order]()


def _listen(trainer: Trainer, orders: queue.SimpleQueue[str]) -> None:
    """Islands are asked at once; the rest waits its turn."""
    for line in sys.stdin:
        match line.split():
            case ["island", name, url]:
                trainer.rollouts.add_island(name, url)
            case [order]:
                orders.put(order)
    orders.put("")


if __name__ == "__main__":
    sys.exit(main())
