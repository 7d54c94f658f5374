"""A snapshot of an image: one state stays readable while the image moves on to the next ones.

Before an overlay is written to the image, the snapshot keeps the bytes that it will replace; laid over the image again,
newest first, they give the state of the beginning. It must never hold a commit up: where what is kept finds no room,
the snapshot is spoilt and every later read of it fails.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.durable import disk_full_as_error
from mailboat.errors import MailboatError, StoreError
from mailboat.image import Image, Overlay
from mailboat.patch.backends import kernels
from mailboat.patch.new_bytes import NewBytes

_EVERYWHERE = np.empty(0, np.uint32)


class Replaced(NewBytes):
    """The bytes of an image that an overlay is about to replace."""

    def __init__(self, image: Image, overlay: Overlay, scratch: Path) -> None:
        tensors = image.inventory.tensors
        super().__init__(len(tensors), scratch)
        try:
            for index, tensor in enumerate(tensors):
                for record in overlay.records(index, 0, tensor.nbytes):
                    old = np.empty(record.nbytes, np.uint8)
                    image.read(index, record.start, old)
                    positions = _EVERYWHERE
                    if record.count:
                        positions = overlay.elements(record)[0]
                        block, old = old, np.empty(record.count * record.width, np.uint8)
                        kernels().gather(block, positions, record.width, old)
                    self._keep(index, (record.start, record.nbytes, record.width), positions, old)
            self.finish()
        except BaseException:
            self.close()
            raise


class Snapshot:
    """The state that ``image`` holds now, as a TensorSource. ``lock`` is held by whoever writes the image."""

    def __init__(self, image: Image, lock: AbstractContextManager[object], scratch: Path) -> None:
        self.state = image.state
        self._image = image
        self._lock = lock
        self._scratch = scratch
        self._replaced: list[Replaced] = []
        self._spoilt = ""
        self._side = {file.path: image.read_side(file.path) for file in image.side_files}

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self.state.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files of the state."""
        return self.state.side_files

    @property
    def nbytes(self) -> int:
        """Bytes kept, in memory or in an unlinked file."""
        return sum(one.nbytes for one in self._replaced)

    def before(self, overlay: Overlay) -> None:
        """``overlay`` is about to be written to the image. The caller holds the lock."""
        if self._spoilt:
            return
        try:
            with disk_full_as_error(self._scratch):
                self._replaced.append(Replaced(self._image, overlay, self._scratch))
        except (MailboatError, OSError) as error:
            self.spoil(str(error))

    def spoil(self, why: str) -> None:
        """The image is not what it was, or about to be closed. The caller holds the lock."""
        self._spoilt = self._spoilt or why
        self._give_back()

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fills ``out`` with bytes of the state. Raises StoreError when the snapshot is spoilt."""
        with self._lock:
            if self._spoilt:
                raise StoreError(f"The snapshot of the image was given up: {self._spoilt}")
            self._image.read(index, offset, out)
            for replaced in reversed(self._replaced):  # the oldest one last: it knows the beginning
                replaced.lay_over(index, offset, out)

    def read_side(self, path: str) -> bytes:
        """A side file of the state."""
        return self._side[path]

    def close(self) -> None:
        """Gives back what was kept."""
        with self._lock:
            self._spoilt = self._spoilt or "it was closed"
            self._give_back()

    def _give_back(self) -> None:
        for replaced in self._replaced:
            replaced.close()
        self._replaced = []
