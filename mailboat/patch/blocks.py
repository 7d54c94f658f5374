"""One block: found changes to bytes, and bytes to changes. No floating-point arithmetic, no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.inventory import Tensor
from mailboat.checkpoint.source import Bytes
from mailboat.digest import seeds
from mailboat.errors import PatchError
from mailboat.patch.classes import Classes, Counts
from mailboat.patch.format import CONTEXTUAL, CONTEXTUAL_SHARE, DENSE, POSITIONAL, SAME, XOR, rice_parameter
from mailboat.patch.scratch import Scratch, Words, address_of
from mailboat.patch.streams import compressed_size, estimate

Positions = npt.NDArray[np.uint32]
Sums = npt.NDArray[np.uint64]
Seeds = tuple[np.uint64, np.uint64]
Measure = Callable[[Bytes, str], int]
_NOTHING = np.empty(0, np.uint8)
_NOWHERE = np.uint64(0), np.uint64(0)
# Below one change in 16 elements, positions always win; above, sizes are compared.
DENSE_FROM = 16
# Where 15 in 16 elements changed, and 15 in 16 of the first changes are no steps, positions are not even tried.
_OTHER_FROM, _OTHER_TO, _SAMPLED = 15, 16, 4096
# Where more than one element in 8 changes, two scans cost less than visiting the words.
_SCAN_FROM = 8
# So many tensors' seeds are kept for the next patch.
_KEPT = 1 << 14


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as the streams take it. Arrays are views of the scratch."""

    encoding: int
    positions: Bytes
    values: Bytes
    literals: Bytes
    dense: Bytes

    def owned(self) -> Encoded:
        """A copy that outlives the scratch."""
        return Encoded(
            self.encoding, self.positions.copy(), self.values.copy(), self.literals.copy(), self.dense.copy()
        )


UNCHANGED = Encoded(SAME, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
CODED = Encoded(CONTEXTUAL, _NOTHING, _NOTHING, _NOTHING, _NOTHING)  # in the words of its group


@dataclass(frozen=True, slots=True)
class BlockCode:
    """A block as the table and the streams give it: `changed` of `elements`, each `width` bytes, ranked by `order`."""

    encoding: int
    elements: int
    width: int
    order: int
    changed: int
    positions: Bytes
    values: Bytes
    literals: Bytes
    dense: Bytes


@dataclass(frozen=True, slots=True)
class Found:
    """How two blocks differ: where, what that does to the sums, and, where the changes are few enough to be contextual,
    the new elements and how many elements, changed ones and changed ones in a sample each class has. Arrays, except the
    counts, are views of the scratch.
    """

    positions: Positions
    delta: Sums
    few: bool
    elements: Bytes
    counts: Counts


def compare(
    scratch: Scratch, old: Words, new: Words, known: Positions | None, *, elements: int, width: int,
    piece: tuple[int, int, int], seed: Seeds, classes: Classes | None,
) -> Found:  # fmt: skip
    """Compare two blocks of `elements`, whose differences may be `known`; `piece` as from `Geometry.piece`. Without
    `classes` nothing is contextual.
    """
    limit = elements // CONTEXTUAL_SHARE
    positions = scratch.positions(old.size * 8 // width)
    kept = scratch.bytes("kept", limit * width)
    counts, delta = np.zeros((3, 256), np.int64), np.zeros(2, np.uint64)
    found = -1
    if known is not None:
        found = known.size
        positions[:found] = known
    every = 0 if classes is None else scratch.kernels.sampling(elements)
    place = _NOWHERE if classes is None else classes.place
    count = scratch.kernels.compare(
        old, new, width, elements, *piece, found, *seed, *place, every, limit, positions, kept, counts, delta
    )
    positions = positions[:count]
    if count > limit:
        before, after = old.view(np.uint8)[: elements * width], new.view(np.uint8)[: elements * width]
        delta = sum_change(scratch, before, after, positions, width=width, piece=piece, seed=seed)
    few = 0 < count <= limit and classes is not None
    return Found(positions, delta, few, kept[: count * width], counts)


def changes(scratch: Scratch, old: Words, new: Words, width: int) -> Positions:
    """Positions at which two blocks differ."""
    positions = scratch.positions(old.size * 8 // width)
    count = scratch.kernels.find_changes(old, new, width, positions)
    return positions[:count]


def encode(
    scratch: Scratch, old: Words, new: Words, positions: Positions, *, elements: int, width: int, order: int
) -> Encoded:
    """Encode a block of `elements` that differs at `positions`; the smallest encoding wins."""
    changed = positions.size
    if changed == 0:
        return UNCHANGED
    compiled = scratch.kernels
    shape = {"width": width, "order": order}
    if changed * _OTHER_TO >= elements * _OTHER_FROM and _mostly_literals(scratch, old, new, positions, **shape):
        return _smaller_planes(scratch, old, new, elements * width, width)[0]
    r = rice_parameter(elements, changed)
    position_bytes = -(-int(compiled.rice_bits(positions, r)) // 8)
    values, literals = _values(scratch, old, new, positions, **shape)
    regular = is_regular(scratch, positions)
    if changed * DENSE_FROM > elements or regular:
        measured = compressed_size if regular else estimate
        size = position_bytes + measured(values, "values") + measured(literals, "literals")
        planes, planes_size = _smaller_planes(scratch, old, new, elements * width, width, measured=measured)
        if planes_size < size:
            return planes
    packed = scratch.bytes("packed", position_bytes)
    compiled.rice_encode(positions, r, packed)
    return Encoded(POSITIONAL, packed, values, literals, _NOTHING)


def _values(
    scratch: Scratch, old: Words, new: Words, positions: Positions, *, width: int, order: int
) -> tuple[Bytes, Bytes]:
    """Value codes and literals of the changes at `positions`."""
    values = scratch.bytes("values", positions.size)
    literals = scratch.bytes("literals", positions.size * width)
    count = scratch.kernels.encode_values(old, new, positions, width, order, values, literals)
    return values, literals[: count * width]


def _mostly_literals(scratch: Scratch, old: Words, new: Words, positions: Positions, *, width: int, order: int) -> bool:
    """Whether the first changes say that the block was replaced rather than moved: then steps can't pay."""
    first = positions[:_SAMPLED]
    literals = _values(scratch, old, new, first, width=width, order=order)[1]
    return literals.size * _OTHER_TO >= first.size * width * _OTHER_FROM


def is_regular(scratch: Scratch, positions: Positions) -> bool:
    """Whether changes lie in runs or at even distances: zstd sees that, while codes of positions do not."""
    return bool(scratch.kernels.is_regular(positions))


def _smaller_planes(
    scratch: Scratch, old: Words, new: Words, nbytes: int, width: int, *, measured: Measure = estimate
) -> tuple[Encoded, int]:
    """The block in planes, xor or dense, with its size."""
    planes = _planes(scratch, old, new, nbytes, width)
    sizes = {
        number: sum(measured(plane, "dense") for plane in np.split(planes[number], width)) for number in (XOR, DENSE)
    }
    best = XOR if sizes[XOR] <= sizes[DENSE] else DENSE
    return Encoded(best, _NOTHING, _NOTHING, _NOTHING, planes[best]), sizes[best]


def size_of(encoded: Encoded) -> int:
    """About how many bytes an encoded block takes in the streams."""
    streams = {"values": encoded.values, "literals": encoded.literals, "dense": encoded.dense}
    return encoded.positions.size + sum(estimate(data, name) for name, data in streams.items())


@lru_cache(_KEPT)
def seeds_of(tensor: Tensor) -> Seeds:
    """A tensor's sum seeds as the kernels take them."""
    seed_a, seed_b = seeds(tensor)
    return np.uint64(seed_a), np.uint64(seed_b)


def sum_change(
    scratch: Scratch, old: Bytes, new: Bytes, positions: Positions, *, width: int, piece: tuple[int, int, int],
    seed: Seeds,
) -> Sums:  # fmt: skip
    """What the changes at `positions` do to a tensor's two sums; `piece` as from `Geometry.piece`."""
    change = np.zeros(2, np.uint64)
    if positions.size * _SCAN_FROM <= old.size // width:
        if positions.size:
            scratch.kernels.sum_changes(old, new, positions, width, *piece, *seed, change)
        return change
    scratch.kernels.sum_rows(new, *piece, *seed, change)
    before = np.zeros(2, np.uint64)
    scratch.kernels.sum_rows(old, *piece, *seed, before)
    return change - before


def _planes(scratch: Scratch, old: Words, new: Words, nbytes: int, width: int) -> dict[int, Bytes]:
    result = {XOR: scratch.bytes("xor planes", nbytes), DENSE: scratch.bytes("dense planes", nbytes)}
    mixed, mixed_bytes = scratch.words("mixed", nbytes)
    np.bitwise_xor(old, new, out=mixed)
    scratch.kernels.split_planes(mixed_bytes, width, result[XOR])
    scratch.kernels.split_planes(new.view(np.uint8)[:nbytes], width, result[DENSE])
    return result


def decode_changes(
    scratch: Scratch, old: Words, code: BlockCode, *, piece: tuple[int, int, int], seed: Seeds
) -> tuple[Positions, Words, Sums]:
    """Positions and new elements (packed into words) of a positional block, and what they do to the two sums of its
    tensor; `piece` as from `Geometry.piece`. Raises PatchError.
    """
    positions, change = scratch.positions(code.changed), np.zeros((1, 2), np.uint64)
    words, _ = scratch.words("elements", code.changed * code.width)
    r = rice_parameter(code.elements, code.changed)
    sizes = code.positions.size, code.literals.size
    row = address_of(old), old.size, code.elements, code.width, code.order, code.changed, r, *sizes, *piece
    require_sound(
        scratch.kernels.decode_positional(
            np.array([row], np.int64), np.array([seed], np.uint64), code.positions, code.values, code.literals,
            positions, words, change,
        )
    )  # fmt: skip
    return positions, words, change[0]


def require_sound(status: int) -> None:
    """Raise PatchError where a run of positional blocks is refused."""
    if status:
        what = (
            "positions are damaged or beyond their block" if status == 1 else "values are none that an encoder writes"
        )
        raise PatchError(f"The patch's {what}; fetch or build the patch again.")


def decode_planes(scratch: Scratch, old: Words, code: BlockCode) -> tuple[Positions, Words]:
    """Positions of the changes of a dense or xor block, and the new block. Raises PatchError."""
    new, new_bytes = scratch.words("new", code.elements * code.width)
    scratch.kernels.join_planes(code.dense, code.width, new_bytes)
    if code.encoding == XOR:
        np.bitwise_xor(old, new, out=new)
    positions = changes(scratch, old, new, code.width)
    if positions.size != code.changed:
        raise PatchError(
            f"The patch promises {code.changed} changes in a block and holds {positions.size}; fetch or build it again."
        )
    return positions, new


def decode(scratch: Scratch, old: Words, code: BlockCode) -> Words:
    """The new block of any encoding but contextual; `old` stays as it is. Raises PatchError."""
    if code.encoding != POSITIONAL:
        return decode_planes(scratch, old, code)[1]
    # Whoever wants the block alone has no use for sums: any place will do.
    piece = code.elements * code.width, 0, 0
    positions, elements, _ = decode_changes(scratch, old, code, piece=piece, seed=_NOWHERE)
    new, new_bytes = scratch.words("new", code.elements * code.width)
    new[:] = old
    scratch.kernels.scatter(positions, elements.view(np.uint8), code.width, 0, new_bytes)
    return new
