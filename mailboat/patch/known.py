"""A target whose changes were found elsewhere, as on an accelerator that holds it: they are laid over the base, block
by block, and nothing is compared but the elements named.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mailboat.checkpoint.source import Bytes
from mailboat.patch.blocks import Positions
from mailboat.patch.scratch import Scratch, Words


@runtime_checkable
class KnownChanges(Protocol):
    """A source that can say what changed in a block against the base that it was made for."""

    def changed(self, index: int, first: int, elements: int) -> tuple[Positions, Bytes] | None:
        """Positions within the block, ascending, of all elements that may have changed, and what they are now; None
        where that is not known. May be called from several threads at once.
        """
        ...


def laid_over(
    scratch: Scratch, old: Words, old_bytes: Bytes, known: tuple[Positions, Bytes], width: int
) -> tuple[Words, Bytes, Positions]:
    """The new block, to be read only, as words and as bytes, and where it differs from the old one."""
    positions, elements = known
    kind = f"u{width}"
    positions = positions[old_bytes.view(kind)[positions] != elements.view(kind)]
    if not positions.size:
        return old, old_bytes, positions
    new, new_bytes = scratch.words("new", old_bytes.size)
    new[:] = old
    scratch.kernels.scatter(known[0], elements, width, 0, new_bytes)
    return new, new_bytes, positions
