"""Launching where the data lie: Triton goes by the current device, whatever device a tensor is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def where_it_lies(
    kernel: Callable[Concatenate[torch.Tensor, Rest], Result],
) -> Callable[Concatenate[torch.Tensor, Rest], Result]:
    """Run a function with the device of its first tensor as the current one; its current stream is used."""

    @wraps(kernel)
    def run(first: torch.Tensor, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call] # on the CPU it does nothing
            return kernel(first, *rest, **named)

    return run
