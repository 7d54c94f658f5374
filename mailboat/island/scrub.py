"""Reads what an island keeps, by strong digests, while the island goes on: the image, the base and the log.

Sums were compared before anything was claimed; strong digests also find what a disk or a memory changes afterwards. It
must never write, remove or hold the island up.
"""

from __future__ import annotations

import os

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.side_files import side_file
from mailboat.checkpoint.source import Bytes
from mailboat.digest import TILE, measure, tiles
from mailboat.errors import DigestMismatch, MailboatError, listed
from mailboat.image import Image
from mailboat.island.background import Pace
from mailboat.island.holding import Holding
from mailboat.island.marker import Marker
from mailboat.island.store import Store
from mailboat.transfer import file_blob

PATIENCE = 5  # moves of the image during one tensor, after which it is read without waiting


def damage_of_image(holding: Holding, pace: Pace) -> str:
    """What is wrong with the image's bytes, in a sentence; empty when nothing is, or when another image took its place
    meanwhile. A tensor that a commit changes while it is read is read again.
    """
    image = holding.image
    if image is None:
        return ""
    buffer = np.empty(TILE, np.uint8)
    wrong = []
    for index, tensor in enumerate(image.inventory.tensors):
        moved = 0
        while (right := _tensor_is_right(holding, image, index, buffer, pace if moved < PATIENCE else None)) is None:
            if holding.image is not image:
                return ""
            moved += 1
        if not right:
            wrong.append(tensor.name)
    if wrong:
        return f"The image's bytes of {listed(wrong)} do not have their strong digests"
    with holding.lock:
        for file in image.side_files if holding.image is image else ():
            if side_file(file.path, image.read_side(file.path)) != file:
                return f"The image's {file.path} is not what was promised"
    return ""


def _tensor_is_right(holding: Holding, image: Image, index: int, buffer: Bytes, pace: Pace | None) -> bool | None:
    """None: the image moved, or is gone."""
    tensor, digest, state = image.inventory.tensors[index], blake3(), image.state
    for tile in tiles(tensor):
        if pace is not None:
            pace.take(tile.nbytes)
        data = buffer[: tile.nbytes]
        with holding.lock:
            if holding.image is not image or image.state is not state:
                return None
            image.read(index, tile.offset, data)
        digest.update(data.data)
    return bool(digest.digest() == state.strong[index].tobytes())


def damage_of_base(store: Store, holding: Holding, pace: Pace) -> str:
    """What is wrong with the base, in a sentence."""
    marker, image = holding.held, holding.image
    if marker is None or image is None:
        return ""
    place = store.base_path(marker.base)
    try:
        with Checkpoint.open(place, aliases=image.inventory.aliases) as base:
            for shard in base.shards:  # what lies on the disk, not what the system remembers of it
                os.posix_fadvise(shard.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if measure(base, threads=1, progress=pace.take).digest != marker.base.state:
                raise DigestMismatch("other bytes")
    except (MailboatError, OSError) as error:
        return "" if _moved_on(holding, marker) else f"The base {place} is damaged ({error})"
    return ""


def damage_of_log(store: Store, holding: Holding, pace: Pace) -> str:
    """What is wrong with the log, in a sentence."""
    marker = holding.held
    if marker is None:
        return ""
    for entry in marker.log:
        for path, part in zip(store.part_paths(entry), entry.parts, strict=True):
            pace.take(part.size)
            if not path.is_file() or file_blob(path) != part:
                return "" if _moved_on(holding, marker) else f"The log's patch to version {entry.version} is damaged"
    return ""


def _moved_on(holding: Holding, marker: Marker) -> bool:
    """Whether what was read belongs to the past: a base and entries that are not named any more are removed."""
    now = holding.marker
    return now is None or now.base != marker.base or now.log[: len(marker.log)] != marker.log
