"""The toy task: one short sentence with a given word, in so few tokens that it must come to its end by itself.

Everything that earns reward can be checked by a rule; no model judges another. SmolLM2 fails at it more often than not
in the beginning, and in every way that one of the two halves can be missed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

ANSWER_TOKENS = 20
WORDS = (
    "river", "bread", "moon", "garden", "window", "horse", "winter", "music", "letter", "bridge", "apple", "cloud",
    "doctor", "island", "paper", "forest", "kitchen", "train", "flower", "teacher", "mountain", "clock", "rain", "ship",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What an island is asked, and the word that the answer must hold."""

    word: str

    @property
    def prompt(self) -> str:
        """The text as the model's chat format has it, without the system line that its template would add."""
        asked = f"Write one short sentence with the word {self.word}."
        return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The two halves of the reward."""

    has_word: bool
    ended: bool

    @property
    def reward(self) -> float:
        """0, a half, or 1."""
        return (self.has_word + self.ended) / 2


def question(number: int) -> Question:
    """The question of this number: every word comes once before any comes again, in an order of its own each time."""
    turn, place = divmod(number, len(WORDS))
    return Question(random.Random(turn).sample(WORDS, len(WORDS))[place])


def verdict(asked: Question, answer: str, *, ended: bool) -> Verdict:
    """`ended`: the model ended the answer itself. The word counts whole, in any case; an empty answer earns nothing."""
    has_word = re.search(rf"\b{re.escape(asked.word)}\b", answer, re.IGNORECASE) is not None
    return Verdict(has_word, ended and bool(answer.strip()))
