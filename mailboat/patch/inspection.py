"""What a patch contains, as plain data for people and scripts. Decodes nothing but headers and tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mailboat.checkpoint.inventory import Inventory
from mailboat.errors import PatchError
from mailboat.patch.container import PatchFile
from mailboat.patch.parts import Parts
from mailboat.patch.statistics import masks, names, shares


def inspect(parts: Sequence[Path], inventory: Inventory | None = None) -> dict[str, Any]:
    """The `mailboat patch inspect --json` document, over one or more parts of one patch.

    Without the inventory of its base a tensor's name is its index there, and dtype and shape are null. A tensor's
    `bytes` are its share of the streams, so they add up to less than the total by header and table. `ratio` = bytes /
    full_bytes.
    Raises PatchError, UnknownCodec.
    """
    with ExitStack() as stack:
        if inventory is not None:
            opened = Parts.open(parts, inventory, stack).parts
        else:
            opened = tuple(stack.enter_context(PatchFile.open(path)) for path in parts)
        if len({(part.from_digest, part.to_digest, part.parts) for part in opened}) != 1:
            raise PatchError("These parts belong to different patches; give the parts of one.")
        if len({part.part for part in opened}) != len(opened):
            raise PatchError("A part is given twice; give each part once.")
        rows = sorted((row for part in opened for row in _tensors(part)), key=lambda row: row[0])
        first = opened[0]
        size = sum(part.size for part in opened)
        return {
            "from": first.from_digest,
            "to": first.to_digest,
            "codecs": sorted({codec for part in opened for codec in part.codecs}),
            "tensors": [_described(index, row, inventory) for index, row in rows],
            "totals": {
                "elements": first.elements,
                "changed": sum(part.changed for part in opened),
                "bytes": size,
                "full_bytes": first.full_bytes,
                "ratio": size / first.full_bytes if first.full_bytes else 0.0,
            },
        }


def _described(index: int, row: dict[str, Any], inventory: Inventory | None) -> dict[str, Any]:
    if inventory is None:
        return {"name": str(index), "dtype": None, "shape": None} | row
    tensor = inventory.tensors[index]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} | row


def _tensors(part: PatchFile) -> list[tuple[int, dict[str, Any]]]:
    """(inventory index, the rest of its row) of each tensor that a part carries."""
    table, taken, used = part.table, shares(part), masks(part)
    rows = []
    for place, index in enumerate(table.index.tolist()):
        row = {
            "elements": int(table.elements[place]),
            "changed": int(table.changed[place]),
            "bytes": int(taken[place]),
            "encoding": "+".join(sorted(names(int(used[place])))) or "same",
        }
        rows.append((index, row))
    return rows
