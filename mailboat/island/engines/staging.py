"""What a sidecar hands to an extension inside an engine: the inventory, and an overlay as element positions and values.

Files in a folder that only this user can read, in memory where there is room; both sides run on one host. They must
never hold anything that a restart needs.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.digest import seeds
from mailboat.errors import InventoryMismatch
from mailboat.image import Overlay

MAGIC = b"mailboat-stage-1\n"
_SHARED = Path("/dev/shm")  # noqa: S108 - a folder of our own inside it


class StagingFolder:
    """A private folder for one engine, removed by `close`."""

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or (_SHARED if os.access(_SHARED, os.W_OK) else None)
        self.path = Path(tempfile.mkdtemp(prefix="mailboat-stage-", dir=place))

    def close(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_inventory(self, inventory: Inventory) -> None:
        """`inventory.json`: names, shapes, widths and the seeds of the sums. Raises InventoryMismatch."""
        if any(tensor.component != "target" for tensor in inventory.tensors):
            raise InventoryMismatch("Only the component target can be written into an engine.")
        body = {
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "width": tensor.width,
                    "seeds": list(seeds(tensor)),
                }
                for tensor in inventory.tensors
            ],
            "aliases": dict(inventory.aliases),
        }
        (self.path / "inventory.json").write_text(json.dumps(body))

    def write_overlay(self, overlay: Overlay, number: int) -> tuple[Path, int]:
        """The overlay's changes: per tensor its index and count as u64, positions as i64, new elements, padded to 8.

        The file, and how many elements it holds: all of a block that the overlay holds whole.
        """
        written = 0
        path = self.path / f"overlay-{number}"
        tensors = overlay.target.inventory.tensors
        with path.open("wb") as file:
            file.write(MAGIC)
            file.write(b"\0" * (-len(MAGIC) % 8))
            for index, tensor in enumerate(tensors):
                positions, elements = _changes(overlay, index, tensor.nbytes, tensor.width)
                if not positions.size:
                    continue
                written += positions.size
                file.write(struct.pack("<QQ", index, positions.size))
                file.write(positions.data)
                file.write(elements.data)
                file.write(b"\0" * (-elements.size % 8))
        return path, written


def _changes(overlay: Overlay, index: int, nbytes: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """All changes of a tensor: element positions in the whole tensor, and their bytes."""
    places, values = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
    for record in overlay.records(index, 0, nbytes):
        first = record.start // width
        if record.count:
            positions, elements = overlay.elements(record)
            places.append(positions.astype(np.int64) + first)
            values.append(elements)
        else:
            places.append(np.arange(first, first + record.nbytes // width, dtype=np.int64))
            values.append(overlay.block(record, 0, record.nbytes))
    return np.concatenate(places), np.concatenate(values)
