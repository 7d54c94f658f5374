"""The contextual encoding of a coding group: changes of consecutive blocks, given the classes of the old elements.

Both sides walk the old bytes in the same way, so nothing that follows from them is sent (docs/format/contextual.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from mailboat.errors import PatchError
from mailboat.patch.backends import kernels
from mailboat.patch.classes import Classes, Counts, Profile, classes_of
from mailboat.patch.format import MAX_GROUP_WORDS, order_of
from mailboat.patch.scratch import Words

Positions = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]
Seeds = tuple[np.uint64, np.uint64]
_CLASSES = 256
_PROFILE_ROOM = 4096
_EVEN = 32768 << 8


class OldBlock(NamedTuple):
    """The base's side of a block to decode: its tensor's inventory index, where its old words lie in memory, its
    elements, how many change, where its rows lie (as `Geometry.piece` says) and the seeds of its tensor's sums.
    """

    tensor: int
    address: int
    elements: int
    changed: int
    piece: tuple[int, int, int]
    seeds: Seeds


class Found(NamedTuple):
    """Changes of blocks, one block after the other: positions, new elements packed into words (whole ones for each
    block), and what each block does to its tensor's two sums.
    """

    positions: Positions
    new: Words
    change: Sums


class NewBlock(NamedTuple):
    """A block to encode: its tensor's inventory index, where its old words lie in memory, its elements, and its changes
    (`new`: the elements, packed into words).
    """

    tensor: int
    address: int
    elements: int
    positions: Positions
    new: Words


def in_calls(addresses: Sequence[int], dtypes: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """The numbers of a group's blocks, as one call takes them: those of one dtype that follow one another and lie in
    memory; each block whose address is 0, which has to be read, alone.
    """
    keys = [
        (-1 if address else number, dtype)
        for number, (address, dtype) in enumerate(zip(addresses, dtypes, strict=True))
    ]
    for (_, dtype), numbers in groupby(range(len(keys)), key=keys.__getitem__):
        yield dtype, list(numbers)


class _Model:
    """What a group has learnt about one dtype."""

    def __init__(self, dtype: str) -> None:
        compiled = kernels()
        self.dtype = dtype
        self.classes: Classes = classes_of(dtype)
        self.place = self.classes.place
        self.order = order_of(dtype)
        self.hazards = np.zeros(_CLASSES, np.uint32)
        self.contexts = np.full(_CLASSES * compiled.CONTEXTS, _EVEN, np.uint32)
        self.profile_contexts = np.full(compiled.CONTEXTS, _EVEN, np.uint32)


class _Walk:
    """What encoder and decoder share: the coder's numbers, one model per dtype, the running scale per tensor."""

    def __init__(self) -> None:
        self._compiled = kernels()
        self._coder = np.zeros(self._compiled.CODER_SIZE, np.uint64)
        self._coder[self._compiled.CODER_RANGE] = np.uint64(2**64 - 1)
        self._models: dict[str, _Model] = {}
        self._tensor = -1

    def _enter(self, tensor: int, dtype: str) -> _Model:
        """The model of a block."""
        if tensor != self._tensor:
            self._compiled.start_tensor(self._coder)
            self._tensor = tensor
        model = self._models.get(dtype)
        if model is None:
            model = self._models[dtype] = _Model(dtype)
            self._introduce(model)
        return model

    def _introduce(self, model: _Model) -> None:
        raise NotImplementedError


class GroupEncoder(_Walk):
    """Encodes a group, block after block, into at most `room` words (and never more than the format allows)."""

    def __init__(self, profiles: dict[str, Profile], room: int) -> None:
        super().__init__()
        self._profiles = profiles
        room = min(room, MAX_GROUP_WORDS) + _PROFILE_ROOM * len(profiles)
        self._out = np.empty(room, np.uint32)

    def add(self, dtype: str, width: int, blocks: Sequence[NewBlock]) -> bool:
        """Append the changes of blocks of one dtype; False when there is no room. Their old words must stay there."""
        model = self._enter(blocks[0].tensor, dtype)
        rows, before = [], self._tensor
        for block in blocks:
            size = -(-block.elements * width // 8)
            begins = block.tensor != before
            rows.append((block.address, size, block.elements, block.positions.size, block.new.size, begins))
            before = block.tensor
        self._tensor = before
        status = self._compiled.encode_blocks(
            np.array(rows, np.int64), width, model.order, *model.place,
            np.concatenate([block.positions for block in blocks]), np.concatenate([block.new for block in blocks]),
            model.hazards, model.contexts, self._coder, self._out,
        )  # fmt: skip
        return bool(status == self._compiled.CONTEXTUAL_OK)

    def compare(
        self, dtype: str, width: int, rows: Rows, seeds: Sums, *, counts: Counts, positions: Positions, changed: Rows,
        change: Sums,
    ) -> bool:  # fmt: skip
        """Find the changes of all blocks of a group, all of one dtype, and append them; False where it isn't one for
        this (`compiled.compare_and_encode` says what the arrays are).
        """
        model = self._enter(int(rows[0, self._compiled.ROW_TENSOR]), dtype)
        status = self._compiled.compare_and_encode(
            rows, seeds, width, model.order, *model.place, counts[0], model.hazards, model.contexts, self._coder,
            positions, self._out, changed, change,
        )  # fmt: skip
        return bool(status == self._compiled.CONTEXTUAL_OK)

    def finish(self) -> Codes:
        """The group's words."""
        count = kernels().finish_group(self._coder, self._out)
        return self._out[:count]

    def _introduce(self, model: _Model) -> None:
        profile = self._profiles[model.dtype]
        model.hazards[:] = kernels().HAZARD_TABLE[profile.levels]
        kernels().encode_profile(
            profile.levels, profile.first, profile.last, model.classes.count, model.profile_contexts, self._coder,
            self._out,
        )  # fmt: skip


class GroupDecoder(_Walk):
    """Decodes a group block by block. Raises PatchError for words that no encoder writes."""

    def __init__(self, words: Codes) -> None:
        super().__init__()
        compiled = kernels()
        self._data = words
        first, second = (int(word) for word in np.append(words[:2], np.uint32(0))[:2])
        self._coder[compiled.CODER_LOW] = np.uint64(first << 32 | second)
        self._coder[compiled.CODER_AT] = np.uint64(2)

    def take(self, dtype: str, width: int, blocks: Sequence[OldBlock]) -> Found:
        """Decode the next blocks, all of one dtype. Their old words must stay there meanwhile."""
        model = self._enter(blocks[0].tensor, dtype)
        rows, before = [], self._tensor
        for block in blocks:
            size, words = -(-block.elements * width // 8), -(-block.changed * width // 8)
            begins = block.tensor != before
            rows.append((block.address, size, block.elements, block.changed, words, begins, *block.piece))
            before = block.tensor
        self._tensor = before
        changed, words = (sum(row[column] for row in rows) for column in (3, 4))
        found = Found(np.empty(changed, np.uint32), np.zeros(words, np.uint64), np.zeros((len(rows), 2), np.uint64))
        status = self._compiled.decode_blocks(
            np.array(rows, np.int64), np.array([block.seeds for block in blocks], np.uint64), width, model.order,
            *model.place, model.hazards, model.contexts, self._coder, self._data, *found,
        )  # fmt: skip
        if status != self._compiled.CONTEXTUAL_OK:
            _damaged()
        return found

    def finish(self) -> None:
        """Check that the words end where the last change does, in the one way in which an encoder ends."""
        compiled = kernels()
        used = int(self._coder[compiled.CODER_AT])
        if used != self._data.size + 1 or int(self._coder[compiled.CODER_LOW]) >> 32:
            _damaged()

    def _introduce(self, model: _Model) -> None:
        status = kernels().decode_profile(
            model.hazards, model.classes.count, model.profile_contexts, self._coder, self._data
        )
        if status != self._compiled.CONTEXTUAL_OK:
            _damaged()


def _damaged() -> NoReturn:
    raise PatchError("The patch's contextual changes are damaged; fetch or build the patch again.")
