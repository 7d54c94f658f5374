"""The policy that learns: FP32 masters, AdamW, and BF16 views that are brought up to date after each step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mailboat.trainer import follow
from scripts.demonstration.rl.grpo import Group, Sample, advantages, surrogate

LEARNING_RATE = 2e-5  # twenty times what long runs take, so that five steps show; their patches are larger too
LONGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimiser step saw. `drift`: mean |log ratio| to the answering policy, by staleness."""

    loss: float
    gradient: float
    flat: int  # groups whose answers all earned the same: nothing to learn from them
    drift: dict[int, float]


class Learner:
    """The model and its optimiser. `version` is what its weights were published as."""

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # islands compute on the same cores
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.tokeniser = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0)
        self.served = follow(self.optimiser, list(self.model.named_parameters()))
        self.version = 0

    def side_files(self, folder: Path) -> dict[str, bytes]:
        """What an engine needs beside the weights; the configuration names the type that is served."""
        files = {
            path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in {".json", ".jinja"}
        }
        served = json.loads(files["config.json"]) | {"dtype": "bfloat16"}
        return files | {"config.json": json.dumps(served, indent=2).encode()}

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return list(self.tokeniser(text)["input_ids"])

    def step(self, groups: Sequence[Group]) -> Step:
        """One optimiser step on a batch of groups."""
        worth = [advantages([sample.reward for sample in group.samples]) for group in groups]
        count = sum(len(self._answer(sample)) for group in groups for sample in group.samples)
        loss, apart = 0.0, _Apart()
        self.optimiser.zero_grad(set_to_none=True)
        for group, advantage in zip(groups, worth, strict=True):
            if any(advantage):
                part = self._loss(group, advantage, apart) / count
                part.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT))
        self.optimiser.step()
        return Step(loss, norm, sum(not any(advantage) for advantage in worth), apart.means())

    def _loss(self, group: Group, advantage: list[float], apart: _Apart) -> torch.Tensor:
        answers = [self._answer(sample) for sample in group.samples]
        longest = max(map(len, answers))
        inputs = torch.tensor([[*group.prompt, *answer, *[0] * (longest - len(answer))] for answer in answers])
        mask = torch.tensor([[1.0] * len(answer) + [0.0] * (longest - len(answer)) for answer in answers])
        # Padding stands behind the answers, where a causal model can't see it from them.
        logits = self.model(input_ids=inputs[:, :-1], logits_to_keep=longest, use_cache=False).logits
        chosen = inputs[:, -longest:]
        new = logits.log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)
        old = new.detach().clone()  # where an engine says nothing (the end's token): as the learning policy has it
        for row, sample in enumerate(group.samples):
            old[row, : len(sample.logprobs)] = torch.tensor(sample.logprobs)
            size = len(sample.logprobs)
            apart.add(self.version - sample.start, (new[row, :size].detach() - old[row, :size]).abs())
        return surrogate(new, old, torch.tensor(advantage), mask)

    def _answer(self, sample: Sample) -> list[int]:
        """Its tokens and, where it ended by itself, the end's: some engines leave that out."""
        end = self.tokeniser.eos_token_id
        missing = sample.ended and sample.tokens[-1:] != (end,)
        return [*sample.tokens, end] if missing else list(sample.tokens)


class _Apart:
    """Sums of |log ratio| by staleness."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}

    def add(self, staleness: int, values: torch.Tensor) -> None:
        total, count = self._sums.get(staleness, (0.0, 0))
        self._sums[staleness] = total + float(values.sum()), count + values.numel()

    def means(self) -> dict[int, float]:
        return {key: total / max(1, count) for key, (total, count) in sorted(self._sums.items())}
