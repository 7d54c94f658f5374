"""The served view of a training process's weights, kept beside its masters and brought up to date after each step.

One pass casts, compares and writes only what changed: by the GPU's kernels where the masters are on one, else on the
CPU, with the same bits. It must never read a float as a number, nor change a master.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mailboat.errors import CheckpointError
from mailboat.patch.backends import gpu_kernels

_log = logging.getLogger(__name__)
_PIECE = 1 << 18  # elements that are cast at a time on the CPU: no second copy of a tensor is ever made


@dataclass(frozen=True, slots=True)
class StepChanges:
    """What one step did to the served weights, and the seconds that finding out added to it."""

    changed: int
    elements: int
    seconds: float

    @property
    def density(self) -> float:
        """Changed elements / all elements."""
        return self.changed / max(1, self.elements)


class ServedWeights:
    """BF16 views of FP32 masters (BF16 ones are served as they are), resident where the masters are.

    `masters`: named parameters; names that share storage share one view. `tensors` is what to publish:
    `publisher.publish(served.tensors)`. Each rank keeps the view of what it holds; that of a split tensor (FSDP2) is a
    distributed tensor again, which RankedPublisher gathers. Raises CheckpointError for masters of another dtype, or
    that are not dense.
    """

    def __init__(self, masters: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        pairs = masters.items() if isinstance(masters, Mapping) else masters
        self.tensors: dict[str, Any] = {}
        self.last: StepChanges | None = None
        self._cast: list[tuple[Any, Any]] = []
        self._elements = 0
        shared: dict[tuple[int, int], Any] = {}
        for name, parameter in pairs:
            master = _local(parameter)
            kind = str(master.dtype).removeprefix("torch.")
            if kind not in {"float32", "bfloat16"} or not master.is_contiguous():
                raise CheckpointError(
                    f"{name} is a {master.dtype} tensor; only dense FP32 and BF16 masters are served."
                )
            key = master.data_ptr(), master.numel()
            if key not in shared or not master.numel():
                shared[key] = master if kind == "bfloat16" else self._view(master)
                self._elements += master.numel()
            self.tensors[name] = _like(parameter, shared[key].reshape(master.shape))

    def _view(self, master: Any) -> Any:
        served = master.bfloat16()
        self._cast.append((master, served))
        _refresh(master, served)
        return served

    def refresh(self) -> StepChanges:
        """Bring the view up to date with the masters; BF16 masters, their own view, count as unchanged."""
        start = time.perf_counter()
        changed = sum(_refresh(master, served) for master, served in self._cast)
        self.last = StepChanges(changed, self._elements, time.perf_counter() - start)
        said = changed, self.last.density * 100, self.last.seconds * 1e3
        _log.info("served weights: %d changed (%.4f %%), %.1f ms", *said)
        return self.last


def follow(optimizer: Any, masters: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> ServedWeights:
    """Keep a served view of `masters` that is brought up to date after each `optimizer.step()`.

    Any torch optimizer, also under DDP and FSDP2. What it costs stands in `last` after each step, and in the log.
    """
    served = ServedWeights(masters)

    def after(*_: Any) -> None:
        served.refresh()

    optimizer.register_step_post_hook(after)
    return served


def _local(parameter: Any) -> Any:
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(parameter: Any, view: Any) -> Any:
    """The view of a rank's part as a part of the whole, where the parameter is one."""
    if not hasattr(parameter, "to_local"):
        return view
    whole = parameter.detach()
    return type(whole).from_local(
        view, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _refresh(master: Any, served: Any) -> int:
    """Cast, compare, write what changed; returns how many elements did."""
    if master.is_cuda:
        changes = gpu_kernels("refresh").refresh_bf16(master, served)
        return int(changes.positions.numel())
    from mailboat.quantise.compiled import cast_bf16  # Numba, on use

    wide, held = master.reshape(-1).numpy().view(np.uint32), _bits(served)
    room = np.empty(min(wide.size, _PIECE), np.uint16)
    changed = 0
    for start in range(0, wide.size, _PIECE):
        old = held[start : start + _PIECE]
        new = room[: old.size]
        cast_bf16(wide[start : start + _PIECE], new)
        where = np.flatnonzero(new != old)
        old[where] = new[where]
        changed += int(where.size)
    return changed


def _bits(served: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    import torch

    bits: np.ndarray[Any, np.dtype[np.uint16]] = served.view(torch.int16).reshape(-1).numpy().view(np.uint16)
    return bits
