"""The contextual encoding in plain Python, written from docs/format/contextual.md alone.

Slow, obvious, shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from tests.patch.ranks import rank, unrank

WINDOW = 1 << 25
PER_EVENT = 6_051_102
EXPONENTS = {"BF16": (7, 256), "F16": (10, 32), "F32": (23, 256), "F64": (52, 256)}
CODES = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
NO_CLASSES = {"F8_E8M0", "BOOL", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64"}


def power(x: int) -> int:
    """2^(64 - x / 256)."""
    if x == 256:
        return 1 << 63
    t, root = 1 << 64, 1 << 63
    for bit in range(7, -1, -1):
        root = isqrt(root << 64)
        if x >> bit & 1:
            t = t * root >> 64
    return t


def hazard(level: int) -> int:
    """The hazard of a level."""
    a, b = divmod(level, 8)
    return 1 << a if b == 0 else ((power(256 - 32 * b) >> 31) << a) >> 32


HAZARDS = [hazard(q) for q in range(192)]
NONE = [(power(i) + (1 << 47)) >> 48 for i in range(257)]


def classes(dtype: str) -> tuple[int, int, int]:
    """(shift, mask, classes)."""
    if dtype in EXPONENTS:
        shift, count = EXPONENTS[dtype]
        return shift, count - 1, count
    if dtype in CODES:
        return 0, 127, 128
    return (0, 0, 1) if dtype in NO_CLASSES else (0, 255, 256)


def none(y: int) -> int:
    """2^-y in 1/65536."""
    whole, i, r = y >> 22, (y >> 14) & 255, (y >> 6) & 255
    if whole >= 16:
        return 1
    return min(max((NONE[i] - (((NONE[i] - NONE[i + 1]) * r) >> 8)) >> whole, 1), 65535)


class Context:
    """An adaptive bit."""

    def __init__(self) -> None:
        self.p, self.n = 32768, 0

    def learn(self, bit: int) -> None:
        """Move towards a bit."""
        rate = 131072 // (2 * min(self.n, 148) + 3)
        self.p += -((self.p * rate) >> 16) if bit else ((65535 - self.p) * rate) >> 16
        self.p = min(max(self.p, 32), 65504)
        self.n += 1


def row() -> list[Context]:
    """The contexts of one number."""
    return [Context() for _ in range(38)]


class RangeDecoder:
    """Section 4."""

    def __init__(self, words: list[int]) -> None:
        self.words, self.taken = words, 0
        self.span = 2**64 - 1
        self.code = self.word() << 32
        self.code += self.word()

    def word(self) -> int:
        """The next word."""
        self.taken += 1
        return self.words[self.taken - 1] if self.taken <= len(self.words) else 0

    def narrow(self, start: int, size: int) -> None:
        """Take an interval."""
        self.code -= start
        self.span = size
        assert 0 <= self.code < size
        if self.span < 1 << 32:
            self.code = (self.code << 32) + self.word()
            self.span <<= 32

    def bit(self, p: int) -> int:
        """A bit that is 0 with probability p / 65536."""
        zero = (self.span >> 16) * p
        if self.code < zero:
            self.narrow(0, zero)
            return 0
        self.narrow(zero, self.span - zero)
        return 1

    def raw(self) -> int:
        """An even bit."""
        return self.bit(32768)

    def adaptive(self, context: Context) -> int:
        """A bit that its context predicts."""
        bit = self.bit(context.p)
        context.learn(bit)
        return bit

    def number(self, contexts: list[Context]) -> int:
        """Unary, then Exp-Golomb."""
        for t in range(6):
            if not self.adaptive(contexts[t]):
                return t
        length = 0
        while length < 62 and self.adaptive(contexts[6 + min(length, 15)]):
            length += 1
        m = 1
        for step in range(length):
            m = 2 * m + (self.raw() if step else self.adaptive(contexts[22 + min(length, 15)]))
        return m + 5

    def end(self) -> None:
        """The words are used up."""
        assert self.code < 1 << 32
        assert self.taken == len(self.words) + 1


class Model:
    """What a group knows about a dtype."""

    def __init__(self, dtype: str, coder: RangeDecoder) -> None:
        self.dtype = dtype
        self.shift, self.mask, count = classes(dtype)
        first = last = 0
        if count > 1:
            first = sum(coder.raw() << i for i in range(7, -1, -1))
            last = sum(coder.raw() << i for i in range(7, -1, -1))
        assert first <= last < count
        self.hazards = [HAZARDS[0]] * 256
        level, contexts = 112, row()
        for c in range(first, last + 1):
            number = coder.number(contexts)
            level += (number + 1) // 2 if number % 2 else -(number // 2)
            assert 0 <= level < 192
            self.hazards[c] = HAZARDS[level]
        self.rows = [row() for _ in range(256)]

    def class_of(self, u: int) -> int:
        """The class of an old element."""
        return (u >> self.shift) & self.mask


class Scale:
    """The running scale of a tensor."""

    def __init__(self) -> None:
        self.events, self.exposure, self.scale, self.due = 4, 4 * PER_EVENT, 65536, 8 * PER_EVENT

    def after_chunk(self) -> None:
        """Bring it up to date."""
        grown = self.exposure + self.events * PER_EVENT
        if grown < self.due:
            return
        self.scale = min(max(((self.events << 16) * PER_EVENT) // self.exposure, 1 << 8), 1 << 24)
        if self.exposure > 1 << 29 or self.events > 1 << 20:
            self.exposure, self.events = (self.exposure + 1) // 2, (self.events + 1) // 2
        grown = self.exposure + self.events * PER_EVENT
        self.due = grown + (grown >> 5)


class Group:
    """Section 5."""

    def __init__(self, words: list[int]) -> None:
        self.coder = RangeDecoder(words)
        self.models: dict[str, Model] = {}
        self.tensor = -1
        self.scale = Scale()

    def block(self, tensor: int, dtype: str, old: list[int], width: int, changes: int) -> Iterator[tuple[int, int]]:
        """(position, new element) of each change of the next block."""
        if tensor != self.tensor:
            self.tensor, self.scale = tensor, Scale()
        if dtype not in self.models:
            self.models[dtype] = Model(dtype, self.coder)
        model = self.models[dtype]
        hazards = [model.hazards[model.class_of(u)] for u in old]
        left = changes
        for start in range(0, len(old), 64):
            if not left:
                return
            j, end = start, min(start + 64, len(old))
            total = sum(hazards[j:end])
            while j < end and left:
                found = self.event(hazards, j, end, total)
                if found[1] < 0:
                    total -= sum(hazards[j : found[0]])
                    j = found[0]
                    continue
                i = found[1]
                yield i, self.value(model, old[i], width)
                left -= 1
                total -= sum(hazards[j : i + 1])
                j = i + 1
            self.scale.after_chunk()
        assert not left

    def event(self, hazards: list[int], j: int, end: int, total: int) -> tuple[int, int]:
        """(end of what was looked at, the changed element in it or -1)."""
        scale = self.scale
        e, part = end, total
        while (part * scale.scale) >> 16 > 3 << 21 and e - j > 1:
            e = j + (e - j) // 2
            part = sum(hazards[j:e])
        if not self.coder.bit(none((part * scale.scale) >> 16)):
            scale.exposure += part
            return e, -1
        i, before = j, 0
        if e - j > 1:
            unit = self.coder.span // (part + e - j)
            while self.coder.code >= unit * (before + i - j + hazards[i] + 1):
                before += hazards[i]
                i += 1
                assert i < e
            self.coder.narrow(unit * (before + i - j), unit * (hazards[i] + 1))
        scale.exposure += before + (hazards[i] >> 1)
        scale.events += 1
        return e, i

    def value(self, model: Model, old: int, width: int) -> int:
        """The new element."""
        down = self.coder.raw()
        size = self.coder.number(model.rows[model.class_of(old)]) + 1
        assert size <= (1 << (8 * width - 1)) - 1 + down
        moved = (rank(old, model.dtype, 8 * width) + (-size if down else size)) % (1 << 8 * width)
        return unrank(moved, model.dtype, 8 * width)
