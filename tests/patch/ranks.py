"""Ranks of bit patterns in plain Python (docs/format/patch.md, section 5)."""

from __future__ import annotations

FLOATS = {"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
SIGNED = {"I8", "I16", "I32", "I64"}


def rank(u: int, dtype: str, bits: int) -> int:
    """Integer order of a bit pattern."""
    top = 1 << (bits - 1)
    if dtype in FLOATS:
        return u ^ ((1 << bits) - 1) if u & top else u | top
    return u ^ top if dtype in SIGNED else u


def unrank(n: int, dtype: str, bits: int) -> int:
    """The bit pattern of a rank."""
    top = 1 << (bits - 1)
    if dtype in FLOATS:
        return n ^ top if n & top else n ^ ((1 << bits) - 1)
    return n ^ top if dtype in SIGNED else n
