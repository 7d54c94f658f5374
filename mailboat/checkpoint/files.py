"""Checkpoints on disk as tensor sources.

Bytes are read by pread, never mapped: a file that is cut short has to be an error, not a signal that ends the process.
A checkpoint is never written here, and what changes while it is read is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mailboat.checkpoint.declared import CONFIG, declared_aliases, quantiser_text, units
from mailboat.checkpoint.folder import SINGLE, Index, find_shards, hash_side_file, read_bounded, side_paths
from mailboat.checkpoint.header import MAX_HEADER, PREFIX, Entry, Header, canonical_header, parse_header
from mailboat.checkpoint.inventory import COMPONENT, DTYPE_BITS, Inventory, Tensor
from mailboat.checkpoint.side_files import MAX_SIDE_BYTES, SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.errors import CheckpointChanged, CheckpointError

_COMPARED = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One file of a layout: its name inside the checkpoint and its header, byte for byte."""

    name: str
    header: Header


@dataclass(frozen=True, slots=True)
class Layout:
    """How tensors lie in files: shards with their headers, the index as (name, bytes), a folder or one lone file.

    `origin` is the checkpoint that the layout was taken from; nothing may be written over it.
    """

    shards: tuple[ShardLayout, ...]
    index: tuple[str, bytes] | None
    is_folder: bool
    origin: Path | None

    @classmethod
    def canonical(cls, inventory: Inventory, *, is_folder: bool) -> Layout:
        """Return the layout of one model.safetensors with all tensors."""
        return cls((ShardLayout(SINGLE, canonical_header(inventory)),), None, is_folder, None)


@dataclass(frozen=True, slots=True)
class _Identity:
    """What a file's status says about its content."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Shard:
    """An open tensor file."""

    name: str
    path: Path
    descriptor: int
    identity: _Identity
    header: Header

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Open a .safetensors file and read its header strictly."""
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file.")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            header = _read_header(descriptor, status.st_size, path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path.name, path, descriptor, _Identity.of(status), header)

    def read(self, offset: int, out: Bytes) -> None:
        """Fill `out` from byte `offset` of the file."""
        view = out.data
        while view:
            count = os.preadv(self.descriptor, [view], offset)
            if count == 0:
                raise CheckpointChanged(f"{self.path} was cut short while it was read; try again when it rests.")
            view = view[count:]
            offset += count


def _read_header(descriptor: int, size: int, path: Path) -> Header:
    prefix = os.pread(descriptor, PREFIX, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX or length > size - PREFIX:
        raise CheckpointError(f"{path} is cut short or not a safetensors file; fetch or write it again.")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"The header of {path} has {length} bytes, more than the {MAX_HEADER} that safetensors allows."
        )
    raw = bytearray(prefix)
    while len(raw) < PREFIX + length:
        if not (piece := os.pread(descriptor, PREFIX + length - len(raw), len(raw))):
            raise CheckpointChanged(f"{path} was cut short while it was read; try again when it rests.")
        raw += piece
    return parse_header(bytes(raw), size, str(path))


class Checkpoint:
    """A checkpoint folder or lone .safetensors file, opened by `Checkpoint.open`; a TensorSource.

    Use as a context manager, or call `close`. A lone file has no side files.
    """

    def __init__(
        self,
        path: Path,
        shards: list[Shard],
        index: Index | None,
        side: dict[str, tuple[SideFile, _Identity]] | None,
        aliases: Mapping[str, str] | None,
    ) -> None:
        self.path = path
        self.is_folder = side is not None
        self.shards = tuple(shards)
        self._index = index
        self._side = side or {}
        if index is not None:
            _check_index(path, index, shards)
        entries: dict[str, tuple[Shard, Entry]] = {}
        for shard in shards:
            for entry in shard.header.entries:
                if entry.name in entries:
                    other = entries[entry.name][0].name
                    raise CheckpointError(f"{entry.name} is in {other} and in {shard.name}; keep one of them.")
                entries[entry.name] = shard, entry
        config = self.read_side(CONFIG) if CONFIG in self._side else None
        tied = dict(aliases) if aliases is not None else declared_aliases(config, entries)
        kept = [name for name in entries if name not in tied]
        grouped = units(kept)
        self._inventory = Inventory.of(
            (_tensor(entries[name][1], grouped.get(name)) for name in kept), tied, quantiser_text(config)
        )
        self._places = [self._place(*entries[tensor.name]) for tensor in self._inventory.tensors]
        for alias in tied:
            if alias in entries:
                self._check_alias(entries[alias], entries[tied[alias]])

    @classmethod
    def open(cls, path: Path | str, *, aliases: Mapping[str, str] | None = None) -> Checkpoint:
        """Open a checkpoint strictly.

        `aliases` replaces what config.json declares. Raises CheckpointError for anything damaged, incomplete or
        unclear, and CheckpointChanged when files change meanwhile.
        """
        path = Path(path)
        shards: list[Shard] = []
        try:
            index, side = None, None
            if path.is_dir():
                names, index = find_shards(path)
                side = {}
                for name in side_paths(path):
                    described, status = hash_side_file(path, name)
                    side[name] = described, _Identity.of(status)
                for name in names:
                    shards.append(Shard.open(path / name))
            elif path.exists():
                shards.append(Shard.open(path))
            else:
                raise CheckpointError(f"There is no checkpoint at {path}; give a .safetensors file or a folder.")
            return cls(path, shards, index, side, aliases)
        except BaseException as problem:
            for shard in shards:
                os.close(shard.descriptor)
            if isinstance(problem, OSError):
                where = problem.filename or path
                raise CheckpointError(f"{where} can't be read: {problem.strerror}.") from None
            raise

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self._inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        return tuple(described for described, _ in self._side.values())

    @property
    def index_bytes(self) -> bytes | None:
        """The index's exact bytes, or None when there is none."""
        return None if self._index is None else self._index.raw

    @property
    def layout(self) -> Layout:
        """How the tensors lie in the files, for a checkpoint to be written alike."""
        index = None if self._index is None else (self._index.name, self._index.raw)
        shards = tuple(ShardLayout(shard.name, shard.header) for shard in self.shards)
        return Layout(shards, index, self.is_folder, self.path)

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`, or raise CheckpointChanged."""
        shard, start, nbytes = self._places[index]
        if offset < 0 or offset + out.size > nbytes:
            raise ValueError("read beyond the tensor")
        shard.read(start + offset, out)

    def read_side(self, path: str) -> bytes:
        """Return a side file whole; raise CheckpointChanged when it isn't what it was at opening."""
        described, identity = self._side[path]
        data = read_bounded(self.path / path, MAX_SIDE_BYTES)
        if len(data) != described.size or _Identity.of((self.path / path).stat()) != identity:
            raise CheckpointChanged(
                f"{self.path / path} changed while the checkpoint was read; try again when it rests."
            )
        return data

    def check_unchanged(self) -> None:
        """Raise CheckpointChanged when any file has changed, appeared or gone since opening."""
        for shard in self.shards:
            self._check_file(shard.path, shard.identity)
            if _Identity.of(os.fstat(shard.descriptor)) != shard.identity:
                raise CheckpointChanged(f"{shard.path} changed while it was read; try again when it rests.")
        for name, (_, identity) in self._side.items():
            self._check_file(self.path / name, identity)
        if self.is_folder and side_paths(self.path) != list(self._side):
            raise CheckpointChanged(f"Files came or went in {self.path} while it was read; try again when it rests.")
        if self._index is not None and read_bounded(self.path / self._index.name, MAX_HEADER) != self._index.raw:
            raise CheckpointChanged(f"The index of {self.path} changed while it was read; try again when it rests.")

    def _check_file(self, path: Path, identity: _Identity) -> None:
        try:
            same = _Identity.of(path.stat()) == identity
        except OSError:
            same = False
        if not same:
            raise CheckpointChanged(f"{path} changed while the checkpoint was read; try again when it rests.")

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""
        shards, self.shards = self.shards, ()
        self._places = []
        for shard in shards:
            os.close(shard.descriptor)

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    @staticmethod
    def _place(shard: Shard, entry: Entry) -> tuple[Shard, int, int]:
        return shard, len(shard.header.raw) + entry.begin, entry.end - entry.begin

    def _check_alias(self, alias: tuple[Shard, Entry], kept: tuple[Shard, Entry]) -> None:
        """Refuse a stored copy of a tied tensor that isn't the same bits."""
        first, second = alias[1], kept[1]
        same = (first.dtype, first.shape, first.end - first.begin) == (
            second.dtype,
            second.shape,
            second.end - second.begin,
        )
        shard, start, nbytes = self._place(*alias)
        other, other_start, _ = self._place(*kept)
        mine, theirs = np.empty(_COMPARED, np.uint8), np.empty(_COMPARED, np.uint8)
        for offset in range(0, nbytes if same else 0, _COMPARED):
            count = min(_COMPARED, nbytes - offset)
            shard.read(start + offset, mine[:count])
            other.read(other_start + offset, theirs[:count])
            same = same and np.array_equal(mine[:count], theirs[:count])
        if not same:
            raise CheckpointError(
                f"{first.name} and {second.name} are declared as one tensor in {CONFIG}, but their bytes differ; "
                "untie them there or store them alike."
            )


def _tensor(entry: Entry, unit: str | None) -> Tensor:
    stored = None if entry.dtype in DTYPE_BITS else entry.end - entry.begin
    return Tensor(COMPONENT, entry.name, entry.dtype, entry.shape, unit, stored)


def _check_index(folder: Path, index: Index, shards: list[Shard]) -> None:
    """Compare an index with what its shards hold: every name in its file, nothing missing, nothing more."""
    held = {(entry.name, shard.name) for shard in shards for entry in shard.header.entries}
    named = set(index.weight_map.items())
    if missing := sorted(named - held):
        name, shard = missing[0]
        raise CheckpointError(
            f"{folder / index.name} names {name} in {shard}, which does not hold it ({len(missing)} in all)."
        )
    if extra := sorted(held - named):
        name, shard = extra[0]
        raise CheckpointError(f"{folder / shard} holds {name}, which {index.name} does not name ({len(extra)} in all).")
