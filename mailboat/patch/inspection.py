"""What a patch contains, as plain data for people and scripts. Decodes nothing but headers and tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.errors import PatchError
from mailboat.patch.container import PatchFile
from mailboat.patch.format import CHUNK_BYTES, ENCODING_NAMES, SAME
from mailboat.patch.parts import Parts
from mailboat.patch.table import STREAMS, Table


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
    table = part.table
    starts = table.block_start
    taken = np.diff(table.starts["positions"][starts])
    taken = taken + _contextual_bytes(table)
    for name in STREAMS:
        taken = taken + np.diff(_packed_offsets(table.starts[name][starts], table.chunks[name]))
    rows = []
    for place, index in enumerate(table.index.tolist()):
        numbers = np.unique(table.encoding[starts[place] : starts[place + 1]])
        names = sorted(ENCODING_NAMES[int(number)] for number in numbers if number != SAME)
        row = {
            "elements": int(table.elements[place]),
            "changed": int(table.changed[place]),
            "bytes": int(taken[place]),
            "encoding": "+".join(names) or "same",
        }
        rows.append((index, row))
    return rows


def _contextual_bytes(table: Table) -> np.ndarray:
    """For each carried tensor its share of the coding groups' words, by changes."""
    groups = table.block_group
    found = np.zeros(len(table.index), np.int64)
    inside = groups >= 0
    changed = table.block_changed[inside].astype(np.int64)
    totals = np.zeros(table.groups, np.int64)
    np.add.at(totals, groups[inside], changed)
    sizes = table.group_words.astype(np.int64) * 4
    np.add.at(found, table.block_tensor[inside], changed * sizes[groups[inside]] // totals[groups[inside]])
    return found


def _packed_offsets(raw: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where raw stream offsets fall in the compressed stream, in proportion inside a chunk."""
    if not len(sizes):
        return np.zeros(len(raw), np.int64)
    last = int(raw[-1]) - (len(sizes) - 1) * CHUNK_BYTES
    lengths = np.full(len(sizes), CHUNK_BYTES, np.int64)
    lengths[-1] = last
    packed = sizes.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(packed)])
    chunk = np.minimum(raw // CHUNK_BYTES, len(sizes) - 1)
    result: np.ndarray = offsets[chunk] + (raw - chunk * CHUNK_BYTES) * packed[chunk] // lengths[chunk]
    return result
