"""(skeleton) Writing checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mailboat.checkpoint.files import Layout
from mailboat.checkpoint.source import TensorSource

if TYPE_CHECKING:
    from mailboat.digest import State


def write_checkpoint(
    source: TensorSource, out: Path, *, layout: Layout | None = None, expect: State | None = None
) -> None:
    """Write `source` to `out`; with `expect` the strong digests of what is written are checked before the replace."""
    raise NotImplementedError
