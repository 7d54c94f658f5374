"""What a patch contains, as plain data for people and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mailboat.checkpoint.inventory import Inventory


def inspect(parts: Sequence[Path], inventory: Inventory | None = None) -> dict[str, Any]:
    """The `mailboat patch inspect --json` document. Without an inventory, names are indices, dtype and shape null."""
    raise NotImplementedError
