"""GRPO with importance ratios: what makes samples of older versions usable.

Shao et al., 2024, arXiv:2402.03300: a sample's advantage is its reward against the others of its group, in units of the
group's spread. Each token's loss is the clipped surrogate of PPO (arXiv:1707.06347) with the ratio between the policy
that learns and the one that answered, as the engine reported it. Every token of a batch counts the same. No KL term:
the runs are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CLIP_BELOW, CLIP_ABOVE = 0.2, 0.28
SPREAD_FLOOR = 1e-4  # added to the spread of rewards


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: its tokens, what the engine gave each (log probability), its reward.

    `start` and `end` are the versions that bound what made it, by the island's stamp.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ended: bool
    reward: float
    start: int
    end: int
    island: str


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one question."""

    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def oldest(self) -> int:
        """The oldest version that may have made a token of it."""
        return min(sample.start for sample in self.samples)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward against its group's mean, in units of its spread; zeros when all are the same."""
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (spread + SPREAD_FLOOR) for reward in rewards]


def surrogate(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss, summed over the tokens where `mask` is 1.

    `new` and `old`: log probabilities by the learning and by the answering policy, samples x tokens; `advantage`: one
    per sample.
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_BELOW, 1 + CLIP_ABOVE)
    each = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -(each * mask).sum()
