"""The attack on sums that docs/format/digests.md warns of: other bytes with both sums equal, by a generalised birthday.

Wagner's tree (CRYPTO 2002): with many words to choose freely, partial sums that vanish in more and more low bits are
paired level by level. Plain NumPy, one core, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.inventory import Tensor
from mailboat.digest import seeds

Words = npt.NDArray[np.uint64]
WORDS = 512  # a tensor needs as many whole words: the more, the quicker
_CANDIDATES = 1 << 14
_KEPT = 1 << 14
# Bits that vanish level by level: 64 of sum a, then 64 of sum b; the last pairing, of two lists, meets 25 bits.
_LEVELS = (("a", 13), ("a", 13), ("a", 13), ("a", 13), ("a", 12), ("b", 13), ("b", 13), ("b", 13), ("b", 25))
_MIXES = (
    (0x243F6A8885A308D3, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    (0x082EFA98EC4E6C89, 0xA4093822299F31D1, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)


@dataclass(frozen=True, slots=True)
class _List:
    """Partial sums, and how each came about: indices into the two lists below."""

    a: Words
    b: Words
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]


def second_preimage(tensor: Tensor, data: bytes) -> bytes:
    """Bytes that differ from `data` in the low bits of its first elements, with the same two sums."""
    row_words = tensor.row_bytes // 8
    assert tensor.row_bytes % 8 == 0 and len(data) >= 8 * WORDS
    old = np.frombuffer(data, "<u8")[:WORDS]
    masks = _masks()
    nodes = [[_leaf(tensor, int(word), masks, divmod(at, row_words)) for at, word in enumerate(old)]]
    shifts = {"a": 0, "b": 0}
    for kind, bits in _LEVELS:
        below = nodes[-1]
        nodes.append([_paired(x, y, kind, shifts[kind], bits) for x, y in zip(below[::2], below[1::2], strict=True)])
        shifts[kind] += bits
    (root,) = nodes[-1]
    assert root.a.size and not root.a[0] and not root.b[0], "no luck; take more candidates"
    chosen = [0]
    for level in reversed(nodes[1:]):
        chosen = [int(side[i]) for node, i in zip(level, chosen, strict=True) for side in (node.left, node.right)]
    forged = old ^ masks[np.array(chosen)]
    return forged.tobytes() + data[8 * WORDS :]


def _masks() -> Words:
    """Changes of a word: some of the low four bits of each of its four 16-bit elements, never none."""
    numbers = np.random.default_rng(1).permutation(np.arange(1, 1 << 16, dtype=np.uint64))[:_CANDIDATES]
    spread = np.zeros(_CANDIDATES, np.uint64)
    for element in range(4):
        spread |= ((numbers >> np.uint64(4 * element)) & np.uint64(15)) << np.uint64(16 * element)
    return spread


def _leaf(tensor: Tensor, word: int, masks: Words, place: tuple[int, int]) -> _List:
    """What each candidate for a word adds to the sums."""
    row, column = place
    changes = []
    for seed, (row_step, word_step, first, second) in zip(seeds(tensor), _MIXES, strict=True):
        at = np.uint64((seed + row * row_step + column * word_step) % (1 << 64))
        before, after = (_mixed(words ^ at, first, second) for words in (np.array([word], np.uint64), word ^ masks))
        changes.append(after - before)
    nothing = np.empty(0, np.int64)
    return _List(changes[0], changes[1], nothing, nothing)


def _mixed(x: Words, first: int, second: int) -> Words:
    x = (x ^ (x >> np.uint64(32))) * np.uint64(first)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(second)
    return x ^ (x >> np.uint64(32))


def _paired(x: _List, y: _List, kind: str, shift: int, bits: int) -> _List:
    """Sums of one of each whose next `bits` low bits vanish, those below being zero already."""
    mask = np.uint64((1 << bits) - 1)
    keys, wanted = (
        (values >> np.uint64(shift)) & mask for values in (getattr(y, kind), np.uint64(0) - getattr(x, kind))
    )
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts, ends = np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
    counts = ends - starts
    left = np.repeat(np.arange(wanted.size), counts)
    right = order[np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)]
    left, right = left[:_KEPT], right[:_KEPT]
    return _List(x.a[left] + y.a[right], x.b[left] + y.b[right], left, right)
