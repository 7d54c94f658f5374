"""Applying a patch to a checkpoint on disk: the result appears whole and verified, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mailboat.checkpoint.files import Checkpoint


def apply_patch(base: Checkpoint, parts: Sequence[Path], out: Path, *, threads: int | None = None) -> str:
    """Write to `out` what the parts make of `base`; returns the state digest. `out` keeps the base's shard layout.

    Raises WrongBase, PatchError, UnknownCodec, DigestMismatch, CheckpointChanged, DiskFull.
    """
    raise NotImplementedError
