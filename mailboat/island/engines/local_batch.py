"""Requests of the local engine that are generated together: one forward pass makes the next token of every row.

A row is one answer of one request. Rows of different lengths are padded on the left; a row that ends, or whose client
went away, leaves at once, and new ones join between two passes. Nothing here knows threads or HTTP.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST_ROWS = 256  # generated together at most; further requests wait


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass
class Sample:
    """One of a request's answers."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None


@dataclass(eq=False)
class Job:
    """A request under way. ``said`` is called after each step, from the stepping thread."""

    prompt: list[int]
    sampling: Sampling
    said: Callable[[], None]
    samples: list[Sample] = field(default_factory=list)
    random: Any = None
    cancelled: bool = False
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return bool(self.error) or all(sample.reason is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of one request."""

    job: Job
    sample: Sample

    @property
    def over(self) -> bool:
        """Whether it needs no more tokens."""
        return self.sample.reason is not None or self.job.cancelled or bool(self.job.error)


class Batch:
    """Rows with their keys and values. ``mask`` tells padding (0) from tokens (1): rows x tokens so far."""

    def __init__(self, model: Any, job: Job) -> None:
        """The rows of one request, its prompt worked through once; `logits` are those of the first token to come."""
        import torch

        seed, count = job.sampling.seed, len(job.samples)
        job.random = torch.Generator()
        job.random.manual_seed(seed) if seed is not None else job.random.seed()
        out = model(input_ids=torch.tensor([job.prompt]), use_cache=True)
        self.rows = [Row(job, sample) for sample in job.samples]
        self._called = _cache_of(model)
        self._cache = out[self._called]
        if count > 1:
            self._cache.batch_repeat_interleave(count)
        self._mask = torch.ones(count, len(job.prompt), dtype=torch.long)
        self._last: Any = None  # the newest token of each row
        self.logits = out.logits[:, -1].float().expand(count, -1)

    @property
    def jobs(self) -> list[Job]:
        """The requests that have rows here, in order."""
        return list(dict.fromkeys(row.job for row in self.rows))

    def choose(self) -> tuple[list[int], list[float]]:
        """A token for each row by its request's sampling, and its log probability.

        A request that no token can be chosen for gets an error; what stands for its tokens means nothing.
        """
        import torch

        chosen, first = [], 0
        for job in self.jobs:
            count = sum(row.job is job for row in self.rows)
            logits = self.logits[first : first + count]
            try:
                if bool(logits.isnan().any()):
                    raise ValueError("the model's logits are not numbers")
                chosen.append(_choose(logits, job.sampling, job.random))
            except (RuntimeError, ValueError) as error:
                job.error = f"{type(error).__name__}: {error}"
                chosen.append(torch.zeros(count, 1, dtype=torch.long))
            first += count
        self._last = torch.cat(chosen)
        scores = self.logits.log_softmax(-1).gather(1, self._last)
        return self._last.squeeze(1).tolist(), scores.squeeze(1).tolist()

    def step(self, model: Any) -> None:
        """One forward pass: `logits` are those of every row's next token."""
        import torch

        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], 1)
        more: dict[str, Any] = {}
        if not bool(self._mask.all()):
            more = {"attention_mask": self._mask, "position_ids": self._mask.sum(1, keepdim=True) - 1}
        out = model(input_ids=self._last, use_cache=True, **{self._called: self._cache}, **more)
        self._cache = out[self._called]
        self.logits = out.logits[:, -1].float()

    def drop_ended(self) -> None:
        """Lets rows that are over go, and padding that nobody needs any more."""
        import torch

        keep = [index for index, row in enumerate(self.rows) if not row.over]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in keep]
        if not keep:
            return
        chosen = torch.tensor(keep)
        self._cache.batch_select_indices(chosen)
        self._mask, self._last = self._mask[chosen], self._last[chosen]
        spare = int((self._mask.cumsum(1) == 0).sum(1).min())
        if spare:
            self._mask = self._mask[:, spare:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, spare:], layer.values[:, :, spare:]

    def takes(self, other: Batch) -> bool:
        """Whether the rows of another batch can be generated with these."""
        return _plain(self._cache) and _plain(other._cache)

    def join(self, other: Batch) -> None:
        """Takes the rows of another batch in; both stand after `choose`."""
        import torch

        length = max(self._mask.shape[1], other._mask.shape[1])
        for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([_padded(mine.keys, length), _padded(theirs.keys, length)])
            mine.values = torch.cat([_padded(mine.values, length), _padded(theirs.values, length)])
        masks = [torch.nn.functional.pad(batch._mask, (length - batch._mask.shape[1], 0)) for batch in (self, other)]
        self._mask = torch.cat(masks)
        self._last = torch.cat([self._last, other._last])
        self.rows += other.rows


def _cache_of(model: Any) -> str:
    """What keys and values are called: `cache` by newer transformers, `past_key_values` by older ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _plain(cache: Any) -> bool:
    """Whether a cache is nothing but keys and values that grow; others (sliding, recurrent) stay by themselves."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def _padded(values: Any, length: int) -> Any:
    import torch

    return torch.nn.functional.pad(values, (0, 0, length - values.shape[-2], 0))


def _choose(logits: Any, sampling: Sampling, random: Any) -> Any:
    import torch

    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # The likeliest is 0 before the division, so that a low temperature makes the others -inf and never that one inf.
    chances = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered > sampling.top_p] = 0
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
    return torch.multinomial(chances, 1, generator=random)
