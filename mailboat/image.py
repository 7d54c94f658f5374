"""The image: the current bytes of one state, as a folder in checkpoint layout that only its owner writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.source import SideFile, TensorSource
from mailboat.digest import State


class Overlay:
    """A decoded patch as absolute bytes, bound to the state it starts from and the state it leads to.

    Up to 64 MiB in memory, beyond that in an unlinked file. `changed` elements, `nbytes` held.
    """

    base_digest: str
    target: State
    changed: int
    nbytes: int

    def close(self) -> None:
        """Give the memory or the file back."""
        raise NotImplementedError


class Image(TensorSource):
    """Bytes of one state with its known sums. Not thread safe; locking between processes is the caller's."""

    folder: Path
    inventory: Inventory
    side_files: tuple[SideFile, ...]
    state: State

    @classmethod
    def create(cls, folder: Path, source: TensorSource, state: State) -> Image:
        """Copy `source` into `folder` (replaced when it exists). The sums are checked; strong digests are the caller's word.

        Raises DigestMismatch, CheckpointChanged, DiskFull.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, folder: Path) -> Image:
        """Open an image. Raises StoreError when it is absent, was interrupted in a commit, or is damaged: rebuild it."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """The state digest that the image holds."""
        return self.state.digest

    def prepare(
        self, parts: Sequence[Path], target: State, *, threads: int | None = None, scratch: Path | None = None
    ) -> Overlay:
        """Decode `parts` against the image and prove by sums that they lead to `target`; touches nothing.

        `scratch` is where an overlay above 64 MiB goes (default: the image folder's parent).
        Raises WrongBase, PatchError, UnknownCodec, DigestMismatch.
        """
        raise NotImplementedError

    def overlaid(self, overlay: Overlay) -> TensorSource:
        """Reads as if the overlay had been committed."""
        raise NotImplementedError

    def commit(self, overlay: Overlay) -> None:
        """Write the overlay. Repeating it is harmless; a crash inside leaves an image that `open` refuses."""
        raise NotImplementedError

    def read(self, index: int, offset: int, out: np.ndarray) -> None:
        """Fill `out` (uint8) with tensor bytes from `offset`."""
        raise NotImplementedError

    def read_side(self, path: str) -> bytes:
        """The bytes of a side file."""
        raise NotImplementedError

    def verify_sums(self, *, threads: int | None = None) -> None:
        """Full scan; raises DigestMismatch naming the tensors whose sums differ."""
        raise NotImplementedError

    def measure(self, *, threads: int | None = None) -> State:
        """Full scan with strong digests: the state of the bytes as they are."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""
        raise NotImplementedError
