"""The one place that chooses who computes, and the only one that finds the GPU's kernels.

MAILBOAT_DEVICE says where: "cpu" (the default), "cuda", "cuda:N", or "interpreter" (the GPU's kernels run by Triton's
interpreter, slowly, for tests). Every backend gives the same bits, so files do not tell which one made them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mailboat
from mailboat.errors import DeviceUnavailable

DEVICE = "MAILBOAT_DEVICE"
_PACKED, _CHECKED_OUT = "mailboat._kernels", "kernels"


def kernels() -> Any:
    """What computes (`find_changes`, `rice_encode`, ...) on the chosen device: `mailboat.compiled` or an equal of it.

    Raises DeviceUnavailable.
    """
    return on_device() or _compiled()


def on_device() -> Any:
    """The GPU's kernels for arrays where a device was chosen, None where the CPU computes. Raises DeviceUnavailable."""
    device = os.environ.get(DEVICE) or "cpu"
    return None if device == "cpu" else _on_device(device)


def gpu_kernels(module: str) -> ModuleType:
    """A module of the GPU's kernels (`changes`, `sums`, `refresh`, `arrays`). Raises DeviceUnavailable."""
    package = _package()
    if package is None:
        raise DeviceUnavailable("This installation has no GPU kernels; install mailboat[gpu].")
    try:
        return importlib.import_module(f"{package}.{module}")
    except ImportError as problem:
        raise DeviceUnavailable(
            f"The GPU kernels can't be loaded ({problem}); install mailboat[gpu] or choose {DEVICE}=cpu."
        ) from problem


@cache
def _compiled() -> ModuleType:
    return importlib.import_module("mailboat.compiled")


@cache
def _on_device(device: str) -> Any:
    if not re.fullmatch(r"interpreter|cuda(:\d+)?", device):
        raise DeviceUnavailable(f"{DEVICE} is {device!r}; choose cpu, cuda, cuda:N or interpreter.")
    if device == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        raise DeviceUnavailable(f"{DEVICE}=interpreter needs TRITON_INTERPRET=1 from the start of the process.")
    arrays = gpu_kernels("arrays")
    if device != "interpreter":
        index = int(device.partition(":")[2] or 0)
        if index >= arrays.torch.cuda.device_count():
            raise DeviceUnavailable(f"There is no CUDA device for {DEVICE}={device}; choose another one or cpu.")
    return arrays.Arrays("cpu" if device == "interpreter" else device, _compiled())


def _package() -> str | None:
    """The wheel carries the kernels inside; in a checkout they lie beside. Nobody else's `kernels` is ever taken."""
    if importlib.util.find_spec(_PACKED) is not None:
        return _PACKED
    beside = Path(mailboat.__file__).resolve().parents[1] / "kernels/__init__.py"
    found = importlib.util.find_spec(_CHECKED_OUT)
    return _CHECKED_OUT if found is not None and found.origin and Path(found.origin).resolve() == beside else None
