"""Constants and geometry of patch format 1; `docs/format/patch.md` is the same in words.

Everything here is frozen: a change of any number is a new format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.inventory import Tensor

Counts = npt.NDArray[np.int64]

FORMAT = "mailboat-patch-1"
BLOCK_ELEMENTS = 1 << 20
CHUNK_BYTES = 1 << 17
MAX_HEADER_BYTES = 1 << 22
MAX_TABLE_BYTES = 1 << 26
MAX_TENSOR_BYTES = 1 << 62
MAX_TENSORS = 1 << 22
MAX_PARTS = 1 << 16
# The contextual encoding: a group is 32 MiB of the part's tensors; more than a quarter changed is never coded so.
GROUP_BYTES = 1 << 25
MAX_GROUP_WORDS = 1 << 23
CONTEXTUAL_SHARE = 4
SIDE_PREFIX = "side:"
# So many tensors' geometries are kept for the next patch: of one model, every patch asks for the same ones.
_KEPT = 1 << 14

SAME, DENSE, XOR, POSITIONAL, CONTEXTUAL = range(5)
ENCODING_NAMES = {DENSE: "dense", XOR: "xor", POSITIONAL: "positional", CONTEXTUAL: "contextual"}
KNOWN_ENCODINGS = (DENSE, XOR, POSITIONAL, CONTEXTUAL)
KNOWN_CODECS = tuple(ENCODING_NAMES[number] for number in KNOWN_ENCODINGS)

ORDER_UNSIGNED, ORDER_SIGNED, ORDER_FLOAT = range(3)
_SIGNED = frozenset({"I8", "I16", "I32", "I64"})
_FLOATS = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


def order_of(dtype: str) -> int:
    """How a dtype's bit patterns are ranked: as floats (sign on top), signed or unsigned integers (all others)."""
    if dtype in _FLOATS:
        return ORDER_FLOAT
    return ORDER_SIGNED if dtype in _SIGNED else ORDER_UNSIGNED


def rice_parameter(elements: int, changed: int) -> int:
    """Low bits of each gap for `changed` positions among `elements`: floor(log2(0.9625 x mean gap)), at least 0.

    The best parameter for geometric gaps is 1 + floor(log2(0.4812 (mean gap + 1/2))) (Kiely, "Selecting the Golomb
    parameter in Rice coding", JPL 2004); this is that in integers, without its half.
    """
    return max(0, ((elements - changed) * 77 // (80 * changed)).bit_length() - 1)


def rice_parameters(elements: Counts, changed: Counts) -> Counts:
    """`rice_parameter` of many blocks at once; counts are at most 2^20, so the exponent of a double is exact."""
    exponents: Counts = np.frexp((elements - changed) * 77 // (80 * changed))[1].astype(np.int64)
    return np.maximum(0, exponents - 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor of `elements` coding elements, `row_elements` in each row, is cut into blocks."""

    elements: int
    row_elements: int
    width: int

    @staticmethod
    @lru_cache(_KEPT)
    def of(tensor: Tensor) -> Geometry:
        """The geometry that inventory and format prescribe."""
        width = tensor.width
        elements = tensor.nbytes // width
        return Geometry(elements, tensor.row_bytes // width if elements else 0, width)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        if self.elements == 0:
            return 0
        rows = self.elements // self.row_elements
        if self.row_elements >= BLOCK_ELEMENTS:
            return rows * -(-self.row_elements // BLOCK_ELEMENTS)
        return -(-rows // (BLOCK_ELEMENTS // self.row_elements))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_elements * self.width

    def block(self, number: int) -> tuple[int, int]:
        """(first element, element count) of a block."""
        if self.row_elements >= BLOCK_ELEMENTS:
            row, piece = divmod(number, -(-self.row_elements // BLOCK_ELEMENTS))
            column = piece * BLOCK_ELEMENTS
            return row * self.row_elements + column, min(BLOCK_ELEMENTS, self.row_elements - column)
        size = BLOCK_ELEMENTS // self.row_elements * self.row_elements
        return number * size, min(size, self.elements - number * size)

    def block_at(self, element: int) -> int:
        """The block that holds an element."""
        if self.row_elements >= BLOCK_ELEMENTS:
            row, column = divmod(element, self.row_elements)
            return row * -(-self.row_elements // BLOCK_ELEMENTS) + column // BLOCK_ELEMENTS
        return element // (BLOCK_ELEMENTS // self.row_elements * self.row_elements)

    def piece(self, first: int, elements: int) -> tuple[int, int, int]:
        """(bytes of a row, or of the cut of one row, in a block.

        Its first row; first word in that row), as sums take it.
        """
        row, column = divmod(first, self.row_elements)
        return min(self.row_elements, elements) * self.width, row, column * self.width // 8

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self.block(number) for number in range(self.blocks))
