"""The policy that learns: FP32 masters, AdamW, and BF16 views that are brought up to date after each step.

Where the processor multiplies BF16 by itself the passes are in BF16, as engines make theirs; it takes half the time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mailboat.errors import MailboatError
from mailboat.trainer import follow
from scripts.demonstration.rl.grpo import Group, Sample, advantages, surrogate

LEARNING_RATE = 2e-5  # twenty times what long runs take, so that five steps show; their patches are larger too
LONGEST_GRADIENT = 1.0
BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
MOST_APART = 1e-3  # of log probabilities in FP32: SmolLM2-135M is apart by 5e-5, as its kernels round


class WrongModel(MailboatError):  # noqa: N818 - what it is
    """A model that the learner would compute wrongly."""

    code = "wrong_model"


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
        """Raises WrongModel."""
        torch.manual_seed(0)
        torch.set_num_threads(1)  # islands compute on the same cores
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.tokeniser = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        require_rows(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0)
        self.served = follow(self.optimiser, list(self.model.named_parameters()))
        self.version = 0
        units = torch.cpu.get_capabilities()
        self._mixed = any(units.get(unit) for unit in BF16_UNITS)

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
        """The loss of a group, summed over its tokens. Its answers share one row and one run through the prompt."""
        answers = [self._answer(sample) for sample in group.samples]
        row = Row.of(group.prompt, answers)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._mixed):
            logits = self.model(
                input_ids=row.tokens, position_ids=row.positions, attention_mask=row.sees, logits_to_keep=row.before,
                use_cache=False,
            ).logits[0]  # fmt: skip
        new = logits.float().log_softmax(-1).gather(-1, row.answered[:, None])
        old = new.detach().clone()  # where an engine says nothing (the end's token): as the learning policy has it
        first, worth = 0, []
        for sample, answer, each in zip(group.samples, answers, advantage, strict=True):
            said = slice(first, first + len(sample.logprobs))
            old[said, 0] = torch.tensor(sample.logprobs)
            apart.add(self.version - sample.start, (new[said].detach() - old[said]).abs())
            worth += [each] * len(answer)
            first += len(answer)
        return surrogate(new, old, torch.tensor(worth), torch.ones_like(new))

    def _answer(self, sample: Sample) -> list[int]:
        """Its tokens and, where it ended by itself, the end's: some engines leave that out."""
        end = self.tokeniser.eos_token_id
        missing = sample.ended and sample.tokens[-1:] != (end,)
        return [*sample.tokens, end] if missing else list(sample.tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt once, then all answers to it one after the other, each of which sees the prompt and itself alone: what
    a model says of every answer is what it says of prompt and answer by themselves.

    `tokens` and `positions`: int64 (1, T); `sees`: bool (1, 1, T, T); for each of the N tokens of all answers,
    `answered`: that token, `before`: the place in the row that it is predicted from, both int64 (N).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor
    answered: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> Row:
        """The row of a group; for models of attention alone."""
        size, tokens, before = len(prompt), list(prompt), []
        positions, part = list(range(size)), [0] * size  # 0: the prompt, else which answer
        for number, answer in enumerate(answers, 1):
            before += [size - 1, *range(len(tokens), len(tokens) + len(answer) - 1)][: len(answer)]
            positions += range(size, size + len(answer))
            part += [number] * len(answer)
            tokens += answer
        of, ones = torch.tensor(part), torch.ones(len(tokens), len(tokens), dtype=torch.bool)
        sees = ones.tril() & ((of[None, :] == 0) | (of[None, :] == of[:, None]))
        return cls(
            torch.tensor([tokens]), torch.tensor([positions]), sees[None, None], torch.tensor(tokens[size:]),
            torch.tensor(before),
        )  # fmt: skip


def require_rows(model: Any) -> None:
    """Raises WrongModel unless `model`, in FP32, says of answers in one row what it says of each by itself.

    A recurrent layer carries what it read from one answer into the next, whatever the mask says.
    """
    size = int(model.get_input_embeddings().weight.shape[0])
    prompt, *answers = ([(first + 7 * place) % size for place in range(8)] for first in (1, 2, 3))
    row = Row.of(prompt, answers)
    trouble = ""
    with torch.inference_mode():
        alone = [model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] for answer in answers]
        try:
            together = model(
                input_ids=row.tokens, position_ids=row.positions, attention_mask=row.sees, logits_to_keep=row.before,
                use_cache=False,
            ).logits[0]  # fmt: skip
            apart = float((together.log_softmax(-1) - torch.cat(alone).log_softmax(-1)).abs().max())
            if not apart <= MOST_APART:
                trouble = f"log probabilities differ by {apart:.2g}"
        except Exception as error:  # noqa: BLE001 - a model that can't take the row ends here, however it says so
            trouble = f"{type(error).__name__}: {error}"
    if trouble:
        raise WrongModel(
            f"{type(model).__name__} can't be learnt here: answers that share a row are not computed as each by itself "
            f"({trouble}). Give --model a decoder of attention alone, without recurrent or convolutional layers."
        )


class _Apart:
    """Sums of |log ratio| by staleness."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}

    def add(self, staleness: int, values: torch.Tensor) -> None:
        total, count = self._sums.get(staleness, (0.0, 0))
        self._sums[staleness] = total + float(values.sum()), count + values.numel()

    def means(self) -> dict[int, float]:
        return {key: total / max(1, count) for key, (total, count) in sorted(self._sums.items())}
