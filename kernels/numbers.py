"""The numbers that the kernels and their twins share: constants of the sums and of the number formats."""

from __future__ import annotations

from dataclasses import dataclass

# Sums: docs/format/digests.md. Two mixes, a and b.
ROW = (0x243F6A8885A308D3, 0x082EFA98EC4E6C89)
WORD = (0x9E3779B97F4A7C15, 0xA4093822299F31D1)
FIRST = (0xBF58476D1CE4E5B9, 0xFF51AFD7ED558CCD)
SECOND = (0x94D049BB133111EB, 0xC4CEB9FE1A85EC53)

# Patches: docs/format/patch.md. Orders of elements (their ranks), and what a decoder says.
UNSIGNED, SIGNED, FLOAT = 0, 1, 2
DECODED, DAMAGED_POSITIONS, DAMAGED_VALUES = 0, 1, 2
# What a decoder is told of a block: where it begins in the old elements, how many elements and changes it has, the
# parameter of its Rice codes, how many bytes they take, and how many elements come as literals.
BLOCK_COLUMNS = AT, ELEMENTS, CHANGED, RICE, CODE_BYTES, LITERALS = range(6)

# Served formats: docs/format/quantisers.md. Bits are those of binary32 unless said.
BF16_INFINITY = 0x7F80
TINY = 0x0F80_0000  # 2^-96: a block whose largest magnitude lies below counts as zero
FP8_MAX = 448.0
FP8_MAX_BITS = 0x43E0_0000
FP4_MAX = 6.0
FP4_MAX_BITS = 0x40C0_0000
INT4_HALF_RANGE = 7.5
NVFP4_RANGE = FP8_MAX * FP4_MAX
FP16_END = 0x4780_0000  # 2^16: that and more is infinite
FP8_BLOCK = 128
UNIT_EXPONENT = 127
SMALLEST_SCALE = 1  # E4M3 code of 2^-9: a group's scale is never zero


@dataclass(frozen=True, slots=True)
class Codes:
    """A small float format: mantissa bits that binary32 has more, and the biased exponent of its least normal."""

    shift: int
    first: int


FP16 = Codes(shift=13, first=113)
E4M3 = Codes(shift=20, first=121)
E2M1 = Codes(shift=22, first=127)

# Group formats.
NVFP4, MXFP4, INT4 = 0, 1, 2
