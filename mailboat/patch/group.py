"""How a coding group is written: contextual where that is smaller, else each block in its own best way.

The choice depends on nothing but the bytes, so it is the same whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mailboat.checkpoint.inventory import Tensor
from mailboat.checkpoint.source import TensorSource
from mailboat.patch import blocks
from mailboat.patch.blocks import Encoded, Positions
from mailboat.patch.classes import Counts, Profile, profile_of, sampled_enough
from mailboat.patch.contextual import Codes, GroupEncoder, NewBlock, in_calls
from mailboat.patch.format import Geometry, order_of
from mailboat.patch.runs import Numbers, address_in
from mailboat.patch.scratch import Scratch, Words, address_of, source_words

_NO_WORDS = np.empty(0, np.uint32)
_NO_COUNTS = np.zeros((2, 256), np.int64)
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Changes:
    """A block's changes while they wait for their group.

    `elements`: the new ones, packed into words; `counts`: elements, changed ones, and changed ones in a sample, by
    class; `least`: bytes that positions alone would take.
    """

    index: int
    first: int
    block_elements: int
    positions: Positions
    elements: Words
    counts: Counts
    least: int


@dataclass(frozen=True, slots=True)
class CodedGroup:
    """The group's words, none where it isn't contextual, and its blocks in order."""

    words: Codes
    blocks: list[Encoded]


def encode_group(
    scratch: Scratch, base: TensorSource, addresses: Numbers, tensors: Sequence[Tensor], changes: Sequence[Changes]
) -> CodedGroup:
    """Encode a group, reading its base again block by block, or where it lies; `addresses` as from `addresses_of`."""
    words = _contextual(scratch, base, addresses, tensors, changes)
    if words is not None:
        size = words.size * _WORD_BYTES + _WORD_BYTES
        sparse = all(block.positions.size * blocks.DENSE_FROM <= block.block_elements for block in changes)
        if sparse and size <= sum(block.least for block in changes):
            return _all_contextual(words, changes)
    others = [_alone(scratch, base, tensors[block.index], block) for block in changes]
    if words is not None and size <= sum(blocks.size_of(block) for block in others):
        return _all_contextual(words, changes)
    return CodedGroup(_NO_WORDS, others)


def _all_contextual(words: Codes, changes: Sequence[Changes]) -> CodedGroup:
    return CodedGroup(words, [blocks.CODED] * len(changes))


def _contextual(
    scratch: Scratch, base: TensorSource, addresses: Numbers, tensors: Sequence[Tensor], changes: Sequence[Changes]
) -> Codes | None:
    """The group's words; None where they would take more than any other encoding."""
    room = sum(block.least + block.positions.size * (1 + tensors[block.index].width) for block in changes)
    dtypes = {tensors[block.index].dtype for block in changes}
    profiles = {
        dtype: _profile([block.counts for block in changes if tensors[block.index].dtype == dtype]) for dtype in dtypes
    }
    encoder = GroupEncoder(profiles, room // _WORD_BYTES + 1)
    placed = [
        address_in(addresses, Geometry.of(tensors[block.index]), block.index, block.first, block.block_elements)
        for block in changes
    ]
    for dtype, numbers in in_calls(placed, [tensors[block.index].dtype for block in changes]):
        width = tensors[changes[numbers[0]].index].width
        new = []
        for number in numbers:
            block = changes[number]
            address = placed[number] or address_of(_old(scratch, base, tensors[block.index], block))
            new.append(NewBlock(block.index, address, block.block_elements, block.positions, block.elements))
        if not encoder.add(dtype, width, new):
            return None
    return encoder.finish()


def _profile(counts: Sequence[Counts]) -> Profile:
    """From the sample where that will do (of the blocks in which it found something), else from all changes."""
    sampled = sum((one[[0, 2]] for one in counts if one[2].any()), _NO_COUNTS)
    return profile_of(sampled if sampled_enough(sampled) else sum((one[:2] for one in counts), _NO_COUNTS))


def _alone(scratch: Scratch, base: TensorSource, tensor: Tensor, block: Changes) -> Encoded:
    """The smallest other encoding of a block."""
    old = _old(scratch, base, tensor, block)
    nbytes = block.block_elements * tensor.width
    new, new_bytes = scratch.words("new", nbytes)
    new[:] = old
    scratch.kernels.scatter(block.positions, block.elements.view(np.uint8), tensor.width, 0, new_bytes)
    order = order_of(tensor.dtype)
    encoded = blocks.encode(
        scratch, old, new, block.positions, elements=block.block_elements, width=tensor.width, order=order
    )
    return encoded.owned()


def _old(scratch: Scratch, base: TensorSource, tensor: Tensor, block: Changes) -> Words:
    width = tensor.width
    span = block.first * width, (block.first + block.block_elements) * width
    return source_words(scratch, "old", base, block.index, span)[0]
