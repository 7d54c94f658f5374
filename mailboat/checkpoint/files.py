"""(skeleton) Checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.source import Bytes, SideFile, TensorSource


@dataclass(frozen=True)
class Layout:
    """How a checkpoint's tensors lie in files."""


class Checkpoint:
    """A checkpoint on disk: a TensorSource."""

    path: Path
    is_folder: bool
    layout: Layout
    inventory: Inventory
    side_files: tuple[SideFile, ...]

    @classmethod
    def open(cls, path: Path | str, *, aliases: dict[str, str] | None = None) -> Checkpoint:
        """Open strictly."""
        raise NotImplementedError

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill out by pread."""
        raise NotImplementedError

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raise CheckpointChanged."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
