"""Small models for patch tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import DTYPE_BITS
from mailboat.checkpoint.source import ArraySource, TensorSource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.patch import BuiltPatch, build_patch

Shape = tuple[int, ...]


def random_bits(dtype: str, shape: Shape, seed: int) -> np.ndarray:
    """Random bytes for a tensor of this dtype and shape, as uint8."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPE_BITS[dtype] // 8
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def source(
    tensors: Mapping[str, tuple[str, Shape, np.ndarray]], side_files: Mapping[str, bytes] | None = None
) -> ArraySource:
    """A source of {name: (dtype, shape, bytes)}."""
    return ArraySource(
        {name: bits for name, (_, _, bits) in tensors.items()},
        dtypes={name: dtype for name, (dtype, _, _) in tensors.items()},
        shapes={name: shape for name, (_, shape, _) in tensors.items()},
        side_files=side_files,
    )


def changed(bits: np.ndarray, width: int, share: float, seed: int, *, step: int = 3) -> np.ndarray:
    """A copy in which about a share of the elements moved by a few steps, or to other bits when `step` is 0."""
    random = np.random.default_rng(seed)
    result = bits.copy()
    elements = result[: len(bits) // width * width].view(f"u{width}")
    chosen = random.random(len(elements)) < share
    if step:
        moves = random.integers(-step, step + 1, len(elements)).astype(f"i{width}").view(f"u{width}")
        elements[chosen] += moves[chosen]
    else:
        other = random.integers(0, 256, elements.nbytes, dtype=np.uint8).view(f"u{width}")
        elements[chosen] = other[chosen]
    return result


def same_bytes(left: TensorSource, right: TensorSource) -> bool:
    """Whether two sources hold the same tensors and side files."""
    return measure(left).digest == measure(right).digest


def written(folder: Path, name: str, content: TensorSource) -> Path:
    """A source as a checkpoint folder."""
    path = folder / name
    write_checkpoint(content, path)
    return path


def built(folder: Path, base: TensorSource, target: TensorSource, name: str = "patch") -> BuiltPatch:
    """The patch between two sources."""
    return build_patch(base, target, folder / name)


def state(content: TensorSource) -> State:
    """The measured state."""
    return measure(content)


def tensor_bytes(content: TensorSource) -> list[tuple[str, bytes]]:
    """(dtype, bytes) of each tensor."""
    return [(t.dtype, read(content, i)) for i, t in enumerate(content.inventory.tensors)]


def read(content: TensorSource, index: int) -> bytes:
    """All bytes of a tensor."""
    out = np.empty(content.inventory.tensors[index].nbytes, np.uint8)
    content.read(index, 0, out)
    return out.tobytes()
