"""The patch part as a file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from mailboat.checkpoint.source import SideFile


class PatchFile:
    """One part, opened strictly: every count, size and digest field is checked before anything is decoded."""

    path: Path
    size: int
    from_digest: str
    to_digest: str
    inventory_digest: str
    codecs: tuple[str, ...]
    part: int
    parts: int
    tensors: int
    elements: int
    full_bytes: int
    changed: int
    removed: tuple[str, ...]
    side_files: tuple[SideFile, ...]

    @classmethod
    def open(cls, path: Path) -> PatchFile:
        """Open and check a part. Raises PatchError, UnknownCodec."""
        raise NotImplementedError

    def read_side(self, path: str) -> bytes:
        """The bytes of a carried side file."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        raise NotImplementedError

    def __enter__(self) -> PatchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
