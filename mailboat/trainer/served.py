"""The served view of a training process's weights, kept beside its masters and brought up to date after each step.

One pass casts, compares and writes only what changed: by the GPU's kernels where the masters are on one, else on the
CPU, with the same bits. It must never read a float as a number, nor change a master.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mailboat.errors import CheckpointError
from mailboat.patch.backends import gpu_kernels
from mailboat.trainer.in_place import on_accelerator, slices
from mailboat.trainer.trail import Trail

_log = logging.getLogger(__name__)


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


class ServedWeights(Mapping[str, Any]):
    """BF16 or FP16 views of FP32 masters, resident where the masters are; masters of the served `dtype` are served as
    they are.

    `masters`: named parameters; names that share storage share one view. `dtype`: BF16 (the default), FP16 or FP32. It
    maps names to views and is what to publish: `publisher.publish(served)`. Each rank keeps the view of what it holds;
    that of a split tensor (FSDP2) is a distributed tensor again, which RankedPublisher gathers. On an accelerator it
    also remembers where views changed since the last versions. Raises CheckpointError for masters of another dtype, or
    that are not dense.
    """

    def __init__(self, masters: Mapping[str, Any] | Iterable[tuple[str, Any]], *, dtype: Any = None) -> None:
        torch = sys.modules["torch"]
        dtype = dtype or torch.bfloat16
        if dtype not in {torch.bfloat16, torch.float16, torch.float32}:
            raise CheckpointError(f"Views of {dtype} are not kept; choose BF16, FP16 or FP32.")
        self.last: StepChanges | None = None
        self._names: dict[str, tuple[Any, _View]] = {}
        self._base: str | None = None
        self._target: str | None = None
        shared: dict[tuple[int, int], _View] = {}
        for name, parameter in masters.items() if isinstance(masters, Mapping) else masters:
            master = _local(parameter)
            if master.dtype not in {torch.float32, dtype} or not master.is_contiguous():
                raise CheckpointError(
                    f"{name} is a {master.dtype} tensor; only dense FP32 masters, and those of {dtype}, are served."
                )
            key = master.data_ptr(), master.numel()
            if key not in shared or not master.numel():
                shared[key] = _View(master, dtype, split=hasattr(parameter, "to_local"))
            shared[key].parameters[name] = parameter
            self._names[name] = parameter, shared[key]
        self._views = list(dict.fromkeys(view for _, view in self._names.values()))
        self._elements = sum(view.elements for view in self._views)
        for view in self._views:
            view.refresh()  # torch casts NaNs in its own way

    def __getitem__(self, name: str) -> Any:
        """The view of a parameter."""
        parameter, view = self._names[name]
        if view.served is None:
            return parameter.detach()
        return _like(parameter, view.served.reshape(_local(parameter).shape))

    def __iter__(self) -> Iterator[str]:
        """Names of the parameters."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._names)

    def refresh(self) -> StepChanges:
        """Bring the views up to date with the masters; masters that are their own view count as unchanged.

        Raises CheckpointError where tied masters were parted, or a master was moved, cast or resized.
        """
        self._wait()  # what the step itself still has to do on a GPU is not ours
        start = time.perf_counter()
        changed = sum(view.refresh() for view in self._views)
        self._wait()
        self.last = StepChanges(changed, self._elements, time.perf_counter() - start)
        said = changed, self.last.density * 100, self.last.seconds * 1e3
        _log.info("served weights: %d changed (%.4f %%), %.1f ms", *said)
        return self.last

    def _wait(self) -> None:
        for device in {view.device for view in self._views if view.device.type == "cuda"}:
            sys.modules["torch"].cuda.current_stream(device).synchronize()

    def recheck(self) -> None:
        """Do the same before a publish: masters may have changed outside of a step, which no hook sees."""
        if changed := sum(view.refresh() for view in self._views):
            _log.info("served weights: %d changed outside of a step", changed)

    # -- what changed since a version

    def since(self, state: str) -> dict[str, Any]:
        """For each name of which that is known: all positions that changed since the state with this digest."""
        if state not in {self._base, self._target}:
            return {}
        found = {
            name: view.trail.since_newer() if state == self._target else view.trail.since_older()
            for name, (_, view) in self._names.items()
            if view.trail is not None
        }
        return {name: positions for name, positions in found.items() if positions is not None}

    def mark(self, base: str | None, target: str) -> None:
        """The views now hold the state `target`, whose patch starts from `base`. The next one starts from either."""
        for trail in (view.trail for view in self._views if view.trail is not None):
            if base is not None and base == self._target:
                trail.from_newer()
            elif base is not None and base == self._base:
                trail.from_older()
            else:
                trail.from_nowhere()
        self._base, self._target = base, target

    def forget(self) -> None:
        """Know nothing of any state: somebody else wrote into a view."""
        self._base = self._target = None


class _View:
    """What is served of one or more masters that share their memory; themselves where they are of the served dtype.

    `trail`: where kernels cast them, and one rank holds them whole.
    """

    def __init__(self, master: Any, dtype: Any, *, split: bool) -> None:
        own = master.dtype == dtype
        self.parameters: dict[str, Any] = {}
        self.device, self.elements, self._dtype = master.device, master.numel(), master.dtype
        self.served = None if own else master.to(dtype)
        self._by_kernels = master.is_cuda or on_accelerator(master)
        self.trail = Trail(master) if self._by_kernels and not own and not split else None

    def refresh(self) -> int:
        """Cast, compare, write what changed; returns how many elements did."""
        first, *others = self.parameters
        master = _local(self.parameters[first])
        for other in others:
            if _local(self.parameters[other]).data_ptr() != master.data_ptr():
                raise CheckpointError(f"{first} and {other} do not share their memory any more; follow them anew.")
        if self.served is None or not self.elements:
            return 0
        if (master.device, master.numel(), master.dtype) != (self.device, self.elements, self._dtype):
            raise CheckpointError(
                f"{first} was {self._dtype} with {self.elements} elements on {self.device} when it was followed. Now "
                f"it is {master.dtype} with {master.numel()} on {master.device}: bring it back, or follow it anew."
            )
        if not self._by_kernels:
            return _refresh(master, self.served)
        changed, kernels = 0, gpu_kernels("refresh")
        refresh = kernels.refresh_fp16 if _is_fp16(self.served) else kernels.refresh_bf16
        for (start, part), (_, served) in zip(slices(master.reshape(-1)), slices(self.served.view(-1)), strict=True):
            positions = refresh(part, served, first=start).positions
            changed += positions.numel()
            if self.trail is not None:
                self.trail.add(positions)
        return changed


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
    """The same on the CPU, in place."""
    from mailboat.quantise.compiled import refresh  # Numba, on use

    bits = served.view(sys.modules["torch"].int16).reshape(-1).numpy().view(np.uint16)
    return int(refresh(master.reshape(-1).numpy().view(np.uint32), bits, _is_fp16(served)))


def _is_fp16(view: Any) -> bool:
    return bool(view.dtype == sys.modules["torch"].float16)
