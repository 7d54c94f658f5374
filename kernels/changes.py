"""Finding and writing changed elements: diff with compaction, scatter.

Tensors are viewed as integers of 1, 2, 4 or 8 bytes; nothing is compared as a float. Positions are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .place import where_it_lies
from .rounding import reserve

BLOCK = 4096
# Room for changes that a kernel is given where nobody expects a number: so many, and one in 32 elements.
FEW = 1 << 16
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TooManyChangesError(Exception):
    """More elements changed than the caller wants to have listed."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Where elements changed: positions ascending (int64, `first` + index), and the elements before and after."""

    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of its element size."""
    return tensor.view(INTEGERS[tensor.element_size()])


class ChangeList:
    """Room for the changes that a kernel finds, in any order, and how many there were."""

    def __init__(self, capacity: int, like: torch.Tensor) -> None:
        self.capacity = capacity
        self.total = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.positions = torch.full((capacity,), -1, dtype=torch.int64, device=like.device)
        self.old = torch.empty(capacity, dtype=like.dtype, device=like.device)
        self.new = torch.empty(capacity, dtype=like.dtype, device=like.device)

    def sorted(self, *others: ChangeList, total: int | None = None) -> Changes:
        """Return the changes of these lists by position; slots that no block filled are left out.

        `total`: how many there are, where there was room for all: then they lie in the first slots.
        """
        lists = (self, *others)
        positions, old, new = (
            torch.cat([getattr(part, name) for part in lists])[:total] for name in ("positions", "old", "new")
        )
        if total is None:
            filled = torch.nonzero(positions >= 0).view(-1)
            positions, old, new = positions[filled], old[filled], new[filled]
        positions, order = torch.sort(positions)
        return Changes(positions, old[order], new[order])


def collect(
    launch: Callable[[ChangeList], None], elements: int, like: torch.Tensor, expected: int | None,
    *, writes: bool, at_most: int | None = None,
) -> Changes:  # fmt: skip
    """Run a kernel with room for `expected` changes (default: 1 in 32), and once more when there are more.

    A kernel that `writes` leaves alone what it has no room for, so its second run finds only the rest.
    Raises TooManyChangesError where there are more than `at_most`, before room for them is taken.
    """
    most = elements if at_most is None else min(elements, at_most)
    room = min(most, elements // 32 + FEW if expected is None else expected)
    found = ChangeList(room, like)
    launch(found)
    total = int(found.total)
    if total > most:
        raise TooManyChangesError(total)
    if total <= room:
        return found.sorted(total=total)
    more = ChangeList(total, like)
    launch(more)
    return more.sorted(found) if writes else more.sorted()


@triton.jit
def place_of(index, columns, stride, CONTIGUOUS: tl.constexpr):
    """Offset of the element `index` of a matrix whose rows are `stride` apart."""
    if CONTIGUOUS:
        return index
    else:
        return index // columns * stride + index % columns


@triton.jit
def _diff(
    old_ptr, new_ptr, total, positions, olds, news, capacity,
    elements, columns, old_stride, new_stride, first, CONTIGUOUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < elements
    old = tl.load(old_ptr + place_of(index, columns, old_stride, CONTIGUOUS), mask=inside, other=0)
    new = tl.load(new_ptr + place_of(index, columns, new_stride, CONTIGUOUS), mask=inside, other=0)
    changed = (old != new) & inside
    slots, fits = reserve(changed, total, capacity)
    keep = changed & fits
    tl.store(positions + slots, index + first, mask=keep)
    tl.store(olds + slots, old, mask=keep)
    tl.store(news + slots, new, mask=keep)


@where_it_lies
def diff(
    old: torch.Tensor, new: torch.Tensor, *, first: int = 0, expected: int | None = None, at_most: int | None = None
) -> Changes:
    """Elements whose bits differ, of two tensors of one shape and element size w.

    Rows (last dimension) are dense, a matrix's rows may be any distance apart. `first` is added to all positions.
    `expected`: room for so many changes is taken; more cost a second pass. Moves 2 E w bytes and (8 + 2 w) for each
    change; then sorts the changes, because blocks finish in any order. Raises TooManyChangesError beyond `at_most`.
    """
    old, new = integers(old), integers(new)
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError("diff compares tensors of one shape and element size")
    dense = old.is_contiguous() and new.is_contiguous()
    old, new = matrix(old, dense=dense), matrix(new, dense=dense)

    def launch(found: ChangeList) -> None:
        if old.numel():
            _diff[(triton.cdiv(old.numel(), BLOCK),)](
                old, new, found.total, found.positions, found.old, found.new, found.capacity,
                old.numel(), old.shape[1], old.stride(0), new.stride(0), first, CONTIGUOUS=dense, SIZE=BLOCK,
            )  # fmt: skip

    return collect(launch, old.numel(), old, expected, writes=False, at_most=at_most)


@triton.jit
def _scatter(out, positions, values, count, start, size, SIZE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    where = tl.load(positions + index, mask=inside, other=0) - start
    value = tl.load(values + index, mask=inside, other=0)
    tl.store(out + where, value, mask=inside & (where >= 0) & (where < size))


@where_it_lies
def scatter(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, *, start: int = 0) -> None:
    """out[position - start] = value for the positions (int64, no repeats) that fall inside the dense `out`.

    Absolute values: doing it again is harmless. Reads (8 + w) bytes a change and touches one 32-byte sector each.
    """
    if not out.is_contiguous():
        raise ValueError("scatter writes into a dense tensor")
    flat = integers(out).view(-1)
    if positions.numel():
        _scatter[(triton.cdiv(positions.numel(), BLOCK),)](
            flat, positions, integers(values), positions.numel(), start, flat.numel(), SIZE=BLOCK
        )


def matrix(tensor: torch.Tensor, *, dense: bool) -> torch.Tensor:
    """View with two dimensions: one row where everything is dense, else a matrix whose rows are."""
    if dense:
        return tensor.view(1, -1)
    if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError("rows must be dense; give a matrix with any distance between rows, or a dense tensor")
    return tensor
