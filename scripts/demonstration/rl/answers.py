"""What a sidecar is asked and what it answers: OpenAI-style completions with a constraint and with stamps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.demonstration.rl.grpo import Group, Sample
from scripts.demonstration.rl.task import ANSWER_TOKENS, Question, verdict


class BadAnswer(Exception):  # noqa: N818 - what it is
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a question. `tokens` do not hold the end's token."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers to a question and the versions that bound what made them."""

    choices: tuple[Choice, ...]
    start: int
    end: int

    @classmethod
    def parse(cls, status: int, data: bytes) -> Answers:
        """Reads a whole answer. Raises BadAnswer."""
        try:
            body = json.loads(data)
            if status != 200:
                raise BadAnswer(f"{status}: {body}")
            choices = tuple(_choice(choice) for choice in body["choices"])
            return cls(choices, int(body["weight_version_start"]), int(body["weight_version_end"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BadAnswer(f"{status}: {data[:200]!r} ({error})") from error


def body_of(
    prompt: Sequence[int], *, samples: int, minimum: int | None = None, exact: int | None = None
) -> dict[str, Any]:
    """A request for several samples by a version no older than `minimum`, or for the likeliest one by exactly one."""
    versions = {"min_version": minimum} if exact is None else {"exact_version": exact}
    return {
        "model": "policy", "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "n": samples, "logprobs": 1,
        "temperature": 1.0 if exact is None else 0, "return_token_ids": True, "weight_version": versions,
    }  # fmt: skip


def groups_of(asked: Question, prompt: Sequence[int], answers: Answers, *, island: str) -> Group:
    """The answers with their rewards."""
    made = answers.start, answers.end, island
    samples = (
        Sample(it.tokens, it.logprobs, it.text, it.ended, verdict(asked, it.text, ended=it.ended).reward, *made)
        for it in answers.choices
    )
    return Group(tuple(prompt), tuple(samples))


def _choice(body: Any) -> Choice:
    tokens, logprobs = tuple(body["token_ids"]), tuple(body["logprobs"]["token_logprobs"])
    ended = body["finish_reason"] == "stop"
    if len(tokens) != len(logprobs) or not all(isinstance(token, int) for token in tokens):
        raise BadAnswer("tokens and log probabilities do not fit")
    return Choice(str(body["text"]), tokens, logprobs, ended)
