"""Writing a checkpoint: complete under a hidden name first, then in place in one step.

The source is never written, and no readable name ever holds half a checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.files import Checkpoint, Layout, ShardLayout
from mailboat.checkpoint.folder import SINGLE, find_shards, side_paths
from mailboat.checkpoint.header import Entry
from mailboat.checkpoint.inventory import DTYPE_BITS, Inventory, Tensor
from mailboat.checkpoint.replace import put_in_place, temporary_beside
from mailboat.checkpoint.side_files import TENSOR_FILE, side_file
from mailboat.checkpoint.source import TensorSource
from mailboat.durable import disk_full_as_error, removed_on_failure, sync_folder
from mailboat.errors import CheckpointError, DigestMismatch, InventoryMismatch, listed

if TYPE_CHECKING:
    from mailboat.digest import State

_TILE = 8 << 20


def write_checkpoint(
    source: TensorSource, out: Path, *, layout: Layout | None = None, expect: State | None = None
) -> None:
    """Write `source` to `out`, atomically replacing what is there.

    With `layout`, files and headers are those of the checkpoint that it was taken from, byte for byte; names that the
    source holds as aliases are written from their tensor. Without, one canonical model.safetensors: a lone file where
    `out` ends in .safetensors, else a folder. A source with side files always gives a folder. With `expect`, every byte
    is compared with that state's strong digests before anything gets its name.

    Raises CheckpointError (`out` touches the source or isn't replaceable), InventoryMismatch (the layout has other
    tensors), DigestMismatch, CheckpointChanged, DiskFull; whatever was at `out` then still stands.
    """
    if layout is None:
        layout = Layout.canonical(source.inventory, is_folder=out.suffix != TENSOR_FILE)
    plan = _plan(source.inventory, layout)
    is_folder = layout.is_folder or bool(source.side_files)
    _check_out(source, layout, out, is_folder=is_folder)
    temporary = temporary_beside(out)
    try:
        with removed_on_failure(temporary), disk_full_as_error(out.parent):
            writer = _Writer(source, expect)
            if is_folder:
                _write_folder(writer, layout, plan, temporary)
            else:
                writer.shard(temporary, layout.shards[0], plan[0])
            if check := getattr(source, "check_unchanged", None):
                check()
            put_in_place(temporary, out)
    except OSError as problem:
        raise CheckpointError(f"{out} can't be written: {problem.strerror or problem}.") from problem


def _write_folder(writer: _Writer, layout: Layout, plan: list[list[int]], folder: Path) -> None:
    folder.mkdir()
    for shard, indices in zip(layout.shards, plan, strict=True):
        # A lone file's own name means nothing inside a folder; loaders look for model.safetensors.
        writer.shard(folder / (shard.name if layout.is_folder else SINGLE), shard, indices)
    if layout.index is not None:
        writer.small(folder / layout.index[0], layout.index[1])
    folders = {folder}
    for path in writer.side_files(folder):
        folders.update(path.parents[: len(path.relative_to(folder).parts)])
    for written in sorted(folders, reverse=True):
        sync_folder(written)


class _Writer:
    """Writes synced files from a source, comparing them with an expected state on the way."""

    def __init__(self, source: TensorSource, expect: State | None) -> None:
        self._source = source
        self._expect = expect
        self._buffer = np.empty(_TILE, np.uint8)
        if expect is not None:
            source.inventory.require_same(expect.inventory)

    def shard(self, path: Path, shard: ShardLayout, indices: list[int]) -> None:
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(shard.header.raw))
            for index in indices:
                self._tensor(file.fileno(), index)
            os.fsync(file.fileno())

    def _tensor(self, descriptor: int, index: int) -> None:
        tensor = self._source.inventory.tensors[index]
        digest = None if self._expect is None else blake3(max_threads=blake3.AUTO)
        for offset in range(0, tensor.nbytes, _TILE):
            tile = self._buffer[: min(_TILE, tensor.nbytes - offset)]
            self._source.read(index, offset, tile)
            if digest is not None:
                digest.update(tile.data)
            _write_all(descriptor, tile.data)
        if digest is not None and self._expect is not None and digest.digest() != self._expect.strong[index].tobytes():
            raise DigestMismatch(
                f"The bytes of {tensor.name} do not have the digest that was promised; nothing was written."
            )

    def small(self, path: Path, data: bytes) -> None:
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(data))
            os.fsync(file.fileno())

    def side_files(self, folder: Path) -> list[Path]:
        """Write the side files and return their paths."""
        files = self._source.side_files
        if self._expect is not None and files != self._expect.side_files:
            raise DigestMismatch("The side files are not those that were promised; nothing was written.")
        written = []
        for file in files:
            content = self._source.read_side(file.path)
            if side_file(file.path, content) != file:
                raise DigestMismatch(f"The side file {file.path} is not what was promised; nothing was written.")
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self.small(path, content)
            written.append(path)
        return written


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _plan(inventory: Inventory, layout: Layout) -> list[list[int]]:
    """Return for each shard the inventory index of each of its entries; raise InventoryMismatch when they differ."""
    plan: list[list[int]] = []
    strange: list[str] = []
    for shard in layout.shards:
        indices = []
        for entry in shard.header.entries:
            index = _find(inventory, entry)
            if index is None:
                strange.append(entry.name)
            else:
                indices.append(index)
        plan.append(indices)
    placed = {index for indices in plan for index in indices}
    homeless = [tensor.name for index, tensor in enumerate(inventory.tensors) if index not in placed]
    if strange or homeless:
        names = strange + homeless
        raise InventoryMismatch(
            f"The tensors do not fit the layout of the files ({listed(names)}); use another base.", names
        )
    return plan


def _find(inventory: Inventory, entry: Entry) -> int | None:
    try:
        index = inventory.index(entry.name)
    except KeyError:
        return None
    return index if _alike(inventory.tensors[index], entry) else None


def _alike(tensor: Tensor, entry: Entry) -> bool:
    stored = None if entry.dtype in DTYPE_BITS else entry.end - entry.begin
    return (tensor.dtype, tensor.shape, tensor.stored) == (entry.dtype, entry.shape, stored)


def _check_out(source: TensorSource, layout: Layout, out: Path, *, is_folder: bool) -> None:
    """Refuse an `out` that would touch what is read, hide side files or replace something that is no checkpoint."""
    if out.name in {"", "..", "."} or not out.parent.is_dir():
        raise CheckpointError(f"{out} can't be written: its folder does not exist.")
    if out.exists() and not (out.is_dir() or out.is_file()):
        raise CheckpointError(f"{out} can't be written: it is neither a file nor a folder; choose another place.")
    if is_folder and out.suffix == TENSOR_FILE and not out.is_dir():
        raise CheckpointError(f"{out} can't hold the side files of a checkpoint folder; give the name of a folder.")
    target = Path(os.path.realpath(out))
    for path in _read_paths(source, layout):
        if target == path or target in path.parents or (path.is_dir() and path in target.parents):
            raise CheckpointError(f"{out} overlaps {path}, which is read and never written; choose another place.")
    if out.is_dir() and not out.is_symlink():
        _check_replaceable(out, {file.path for file in source.side_files} | _side_paths(layout))


def _read_paths(source: TensorSource, layout: Layout) -> set[Path]:
    """Return every file and folder that is read, links resolved."""
    paths: set[Path] = set()
    for origin in (layout.origin, source.path if isinstance(source, Checkpoint) else None):
        if origin is not None:
            paths.add(origin)
        if origin is not None and origin.is_dir():
            paths |= {origin / name for name in (*find_shards(origin)[0], *side_paths(origin))}
    return {Path(os.path.realpath(path)) for path in paths}


def _side_paths(layout: Layout) -> set[str]:
    return set(side_paths(layout.origin)) if layout.origin is not None and layout.origin.is_dir() else set()


def _check_replaceable(folder: Path, known: set[str]) -> None:
    """Refuse to replace a folder unless it is empty, or a checkpoint with no other files than those that are `known`.

    What goes with the folder is lost: somebody's notes beside a model are no part of it.
    """
    if not any(os.scandir(folder)):
        return
    try:
        shards, index = find_shards(folder)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{folder} is a folder but not a checkpoint; remove it or choose another place."
        ) from problem
    own = {*shards, *known} | ({index.name} if index is not None else set())
    for inside, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(inside) / name).is_symlink()]
        for name in sorted([*files, *links]):
            path = (Path(inside) / name).relative_to(folder).as_posix()
            if path not in own:
                raise CheckpointError(
                    f"{folder} holds {path}, which is no part of the checkpoint that would replace it; "
                    "move it away, remove the folder or choose another place."
                )
