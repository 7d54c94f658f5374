"""The sides that one test body runs on; every side takes and gives NumPy arrays of bits and writes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels import reference

Array = np.ndarray[Any, Any]


class Host(np.ndarray[Any, Any]):
    """Numbers that stay on the host on every side."""


class Side:
    """Calls a kernel by its name."""

    name = "reference"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(reference, name)


class Interpreter(Side):
    """Triton kernels on a device: NumPy arrays go there as they lie (with their strides) and come back."""

    name, device = "interpreter", "cpu"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from kernels import changes, decode, refresh, sums

        function = next(getattr(m, name) for m in (changes, decode, sums, refresh) if hasattr(m, name))
        return lambda *arguments, **options: self._call(function, arguments, options)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        there = [self._tensor(a) if _travels(a) else a for a in arguments]
        result = function(*there, **options)
        for array, tensor in zip(arguments, there, strict=True):
            if _travels(array):
                signed(array)[...] = tensor.cpu().numpy()
        return _back(result)

    def _tensor(self, array: Array) -> Any:
        import torch

        here = torch.from_numpy(signed(array).copy(order="K"))
        strides = [step // array.itemsize for step in array.strides]
        extent = (
            1 + sum((size - 1) * step for size, step in zip(array.shape, strides, strict=True)) if array.size else 0
        )
        there = torch.zeros(extent, dtype=here.dtype, device=self.device).as_strided(array.shape, strides)
        return there.copy_(here)


class Gpu(Interpreter):
    """Triton kernels on a CUDA device."""

    name, device = "gpu", "cuda"


def reference_side() -> Side:
    """The NumPy twins."""
    return Side()


def gpu_side() -> Side:
    """A CUDA device."""
    return Gpu()


def signed(array: Array) -> Array:
    """The same memory as integers that torch knows (floats stay)."""
    return array.view(f"i{array.itemsize}") if array.dtype.kind == "u" and array.itemsize > 1 else array


def bits(array: Any) -> Array:
    """An array as unsigned integers."""
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def _travels(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and not isinstance(argument, Host)


def _back(result: Any) -> Any:
    if hasattr(result, "status"):
        return reference.Decoded(result.positions.cpu().numpy(), result.new.cpu().numpy(), result.status)
    if hasattr(result, "positions"):
        return reference.Changes(*(getattr(result, part).cpu().numpy() for part in ("positions", "old", "new")))
    if isinstance(result, tuple):
        return tuple(_back(part) for part in result)
    return result.cpu().numpy() if hasattr(result, "cpu") else result


def assert_same(found: reference.Changes, expected: reference.Changes) -> None:
    """Positions, old and new bits alike."""
    assert found.positions.dtype == np.int64
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(bits(found.old), bits(expected.old))
    np.testing.assert_array_equal(bits(found.new), bits(expected.new))
