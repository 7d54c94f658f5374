"""Asks islands' sidecars for answers, all the time, and keeps those that are fresh enough to learn from.

Every request names the oldest version that may answer it: the newest published one less the budget. The sidecars keep
to that when they begin; the stamps of their answers are checked here again when the answers are used, since the trainer
has gone on meanwhile. An answer that was begun and did not come whole is counted as lost: there should be none.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError

from scripts.demonstration.rl.answers import Answers, BadAnswer, body_of, groups_of
from scripts.demonstration.rl.grpo import Group
from scripts.demonstration.rl.task import Question, question

ASKED_AT_ONCE = 2  # requests under way per island: one computes, one waits
PAUSE = 1.0  # seconds before an island that could not answer is asked again, as its Retry-After says
ANSWER_SECONDS = 120.0
REFUSALS = frozenset({409, 503})


class NoAnswers(Exception):  # noqa: N818 - what there are
    """No island answers any more."""


@dataclass
class Counts:
    """What became of requests and samples.

    `by_version` and `by_staleness` count the samples that were learnt from; `earned` is what those of a version earned.
    """

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by status: the version isn't there, or no engine is
    unreachable: int = 0  # nobody listened: the request was never sent
    lost: int = 0
    misstamped: int = 0
    stale: int = 0
    spanning: int = 0
    by_version: Counter[int] = field(default_factory=Counter)
    by_staleness: Counter[int] = field(default_factory=Counter)
    earned: dict[int, float] = field(default_factory=dict)


class Rollouts:
    """Threads that ask, and the answers that wait to be learnt from.

    `ahead`: how many groups may wait or be under way; asking rests when there are so many.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, samples: int, budget: int, ahead: int) -> None:
        self.counts = Counts()
        self._encode, self._samples, self._budget, self._ahead = encode, samples, budget, ahead
        self._published = self._announced = 0
        self._islands: dict[str, str] = {}
        self._waiting: deque[Group] = deque()
        self._unanswered: deque[Question] = deque()
        self._asked = self._running = 0
        self._change = threading.Condition()
        self._ended = False
        self._threads: list[threading.Thread] = []

    # -- what the trainer says

    def add_island(self, name: str, url: str) -> None:
        """Asks an island from now on, or asks it at another address."""
        with self._change:
            new = name not in self._islands
            self._islands[name] = url
        for _ in range(ASKED_AT_ONCE if new else 0):
            thread = threading.Thread(target=self._ask_on, args=(name,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def announce(self, version: int) -> None:
        """Some islands may serve this version from now on."""
        self._announced = version

    def published(self, version: int) -> None:
        """What is asked from now on may be at most the budget older than this."""
        with self._change:
            self._published = version
            self._change.notify_all()

    def close(self) -> None:
        """Takes no more; requests under way end by themselves."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def progress(self) -> Mapping[str, int]:
        """How many groups wait, and how many are under way."""
        with self._change:
            return {"waiting": len(self._waiting), "running": self._running}

    def take(self, groups: int) -> list[Group]:
        """Waits for so many groups that are within the budget now; older ones are dropped and counted."""
        limit = max(0, self._published - self._budget)
        taken: list[Group] = []
        with self._change:
            while len(taken) < groups:
                group = self._next_waiting()
                if group.oldest < limit:
                    self.counts.stale += len(group.samples)
                else:
                    taken.append(group)
            for group in taken:
                self._count_used(group)
        return taken

    def take_newest(self, groups: int) -> list[Group]:
        """Waits for so many groups that the newest version alone has made: to look at, not to learn from."""
        taken: list[Group] = []
        with self._change:
            while len(taken) < groups:
                group = self._next_waiting()
                if group.oldest == self._published:
                    taken.append(group)
        return taken

    def _count_used(self, group: Group) -> None:
        counts, version = self.counts, group.oldest
        counts.by_version[version] += len(group.samples)
        counts.by_staleness[self._published - version] += len(group.samples)
        counts.earned[version] = counts.earned.get(version, 0.0) + sum(sample.reward for sample in group.samples)

    def _next_waiting(self) -> Group:
        """Raises NoAnswers."""
        if not self._change.wait_for(lambda: self._waiting, ANSWER_SECONDS):
            raise NoAnswers(f"no island has answered for {ANSWER_SECONDS:.0f} s")
        self._change.notify_all()  # there is room for one more
        return self._waiting.popleft()

    # -- the threads

    def _ask_on(self, name: str) -> None:
        pool = urllib3.PoolManager(retries=False)
        while (asked := self._next()) is not None:
            group = None
            try:
                group = self._ask(pool, name, asked)
            finally:
                with self._change:
                    self._running -= 1
                    if group is None:
                        self._unanswered.append(asked)  # another island may be quicker
                    else:
                        self._waiting.append(group)
                    self._change.notify_all()
            if group is None:
                with self._change:
                    self._change.wait_for(lambda: self._ended, PAUSE)

    def _next(self) -> Question | None:
        with self._change:
            self._change.wait_for(lambda: self._ended or len(self._waiting) + self._running < self._ahead)
            if self._ended:
                return None
            self._running += 1
            if self._unanswered:
                return self._unanswered.popleft()
            self._asked += 1
            return question(self._asked - 1)

    def _ask(self, pool: urllib3.PoolManager, name: str, asked: Question) -> Group | None:
        prompt, minimum = self._encode(asked.prompt), max(0, self._published - self._budget)
        body = body_of(prompt, samples=self._samples, minimum=minimum)
        url = f"{self._islands[name]}/v1/completions"
        try:
            answer = pool.request("POST", url, json=body, timeout=ANSWER_SECONDS)
            if answer.status in REFUSALS:
                self._count("refused", str(answer.status))
                return None
            answers = Answers.parse(answer.status, answer.data)
        except (NewConnectionError, MaxRetryError):
            self._count("unreachable")
            return None
        except (HTTPError, BadAnswer) as error:
            print(f"an answer of {name} was lost: {error}", file=sys.stderr, flush=True)
            self._count("lost")
            return None
        if not minimum <= answers.start <= answers.end <= self._announced:
            self._count("misstamped")
            return None
        self._count("answered", name)
        if answers.start != answers.end:
            self._count("spanning", more=len(answers.choices))
        return groups_of(asked, prompt, answers, island=name)

    def _count(self, what: str, key: str = "", more: int = 1) -> None:
        with self._change:
            if key:
                getattr(self.counts, what)[key] += more
            else:
                setattr(self.counts, what, getattr(self.counts, what) + more)
