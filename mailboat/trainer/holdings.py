"""Who holds what among the ranks of a training job, and which rank publishes it.

Each tensor has one owner, so it is published exactly once; replicas are proven equal, bit for bit, before anything is
published. It must never choose between replicas that differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.declared import CONFIG, declared_aliases
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile, side_file
from mailboat.checkpoint.source import ArraySource, Bytes, Described, described_inventory, tied_names
from mailboat.digest import State, measure
from mailboat.errors import CheckpointError
from mailboat.trainer.hooks import NamedTensors, bits_of, kind_of
from mailboat.trainer.ranks import Ranks

Shard = tuple[str, tuple[int, ...]]  # a tensor's name, and which of its shards


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor: ranks with the same `shard` hold the same bytes. `split`: there is more of it
    elsewhere. `place`: where it lies in this rank's memory; None where it holds nothing of it.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    split: bool
    place: Hashable | None


class OwnedSource:
    """The tensors that one rank owns, under the inventory of all; reading another rank's is a defect."""

    def __init__(self, inventory: Inventory, side: Mapping[str, bytes], bits: Mapping[int, Bytes]) -> None:
        self.inventory = inventory
        self.side_files: tuple[SideFile, ...] = tuple(side_file(path, side[path]) for path in sorted(side))
        self.indices = tuple(sorted(bits))
        self._side, self._bits = side, bits

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        out[:] = self._bits[index][offset : offset + out.size]

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        return self._side[path]

    def nothing(self) -> State:
        """The state without its rows, to be filled in."""
        count = len(self.inventory.tensors)
        return State(self.inventory, np.zeros((count, 2), np.uint64), np.zeros((count, 32), np.uint8), self.side_files)

    def measure(self) -> State:
        """The state, of which only the rows of what is owned are right."""
        tensors, state = self.inventory.tensors, self.nothing()
        if self.indices:
            names = [tensors[index].name for index in self.indices]
            owned = ArraySource(
                {name: self._bits[index] for name, index in zip(names, self.indices, strict=True)},
                dtypes={tensors[index].name: tensors[index].dtype for index in self.indices},
                shapes={tensors[index].name: tensors[index].shape for index in self.indices},
                aliases={},
            )
            found = measure(owned)
            for name, index in zip(names, self.indices, strict=True):
                row = found.inventory.index(name)
                state.sums[index], state.strong[index] = found.sums[row], found.strong[row]
        return state


@dataclass(frozen=True)
class Holdings:
    """The tensors of all ranks: their inventory, each one's owner, and what this rank owns."""

    inventory: Inventory
    owners: list[int]
    own: OwnedSource

    @classmethod
    def of(cls, ranks: Ranks, named_tensors: NamedTensors, side: Mapping[str, bytes]) -> Holdings:
        """Called by all ranks. A rank may hold tensors that others lack.

        Raises CheckpointError with the tensor's name where ranks hold other shapes or other bytes for one tensor.
        """
        values: dict[str, Any] = {}

        def look() -> dict[str, Piece]:
            for name, value in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
                if name in values:
                    raise CheckpointError(f"{name} was given twice on one rank; give each tensor once.")
                values[name] = value.detach() if hasattr(value, "detach") else value
            return {name: _piece(name, value) for name, value in values.items()}

        pieces = ranks.together(look)
        described = _described(pieces)
        config = side.get(CONFIG)
        tied = _tied(pieces, described, config)
        _prove_equal(ranks, pieces, values, tied)
        inventory = described_inventory(described, tied, config)
        owners = _owners(inventory, pieces)
        bits: dict[int, Bytes] = {}
        ranks.together(lambda: bits.update(_owned(ranks.rank, inventory, owners, pieces[ranks.rank], values)))
        return cls(inventory, owners, OwnedSource(inventory, side, bits))


def _piece(name: str, value: Any) -> Piece:
    dtype, shape = kind_of(name, value)
    if not hasattr(value, "to_local"):
        return Piece(dtype, shape, (), False, _place(value))
    mesh, placements = value.device_mesh, value.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f"{name} is a sum that is not made yet; reduce it before it is published.")
    split = [not placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(placements)]
    shard = tuple(at for at, is_split in zip(mesh.get_coordinate(), split, strict=True) if is_split)
    place = _place(value.to_local())
    return Piece(dtype, shape, shard, any(split), place and (place, shape))


def _place(value: Any) -> Hashable | None:
    if isinstance(value, np.ndarray):
        return (
            (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str) if value.size else None
        )
    if not value.numel():
        return None
    return str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), str(value.dtype)


def _described(pieces: list[dict[str, Piece]]) -> dict[str, Described]:
    described: dict[str, Described] = {}
    for rank, held in enumerate(pieces):
        for name, piece in held.items():
            said: Described = (piece.dtype, piece.shape, None)
            if described.setdefault(name, said) != said:
                raise CheckpointError(
                    f"{name} is {piece.dtype} {list(piece.shape)} on rank {rank} and "
                    f"{described[name][0]} {list(described[name][1])} on another; nothing was published."
                )
    if not described:
        raise CheckpointError("No tensor was given on any rank; there is nothing to publish.")
    return described


def _tied(pieces: list[dict[str, Piece]], described: Mapping[str, Described], config: bytes | None) -> dict[str, str]:
    """Names of one tensor, by memory (where a rank holds nothing of it, another one knows) and by config.json."""
    tied: dict[str, str] = {}
    for held in pieces:
        tied |= tied_names({name: piece.place for name, piece in held.items() if piece.place is not None})
    tied |= declared_aliases(config, described)
    for alias in tied:
        while tied[alias] in tied:
            tied[alias] = tied[tied[alias]]
        if tied[alias] not in described:
            raise CheckpointError(f"{alias} is declared as another name of {tied[alias]}, which is not there.")
    return tied


def _prove_equal(
    ranks: Ranks, pieces: list[dict[str, Piece]], values: Mapping[str, Any], tied: Mapping[str, str]
) -> None:
    """Compare the digests of whatever lies in more than one place: replicas, and names of one tensor.

    One tensor at a time is copied to the host where it is not there.
    """
    places: dict[Shard, set[tuple[int, Hashable]]] = {}
    split: dict[str, bool] = {}
    for rank, held in enumerate(pieces):
        for name, piece in held.items():
            tensor = tied.get(name, name)
            if split.setdefault(tensor, piece.split) != piece.split:
                raise CheckpointError(f"{name} is split on some ranks and whole on others; hold it in one way.")
            if piece.place is not None:
                places.setdefault((tensor, piece.shard), set()).add((rank, piece.place))

    def digest() -> dict[str, bytes]:
        held = pieces[ranks.rank].items()
        again = [n for n, piece in held if len(places.get((tied.get(n, n), piece.shard), ())) > 1 and piece.place]
        return {name: blake3(_host_bits(name, values[name]).data).digest() for name in again}

    first: dict[Shard, tuple[str, int, bytes]] = {}
    for rank, found in enumerate(ranks.together(digest)):
        for name, strong in found.items():
            shard = tied.get(name, name), pieces[rank][name].shard
            other, at, expected = first.setdefault(shard, (name, rank, strong))
            if strong != expected:
                raise CheckpointError(
                    f"{name} on rank {rank} and {other} on rank {at} should be one tensor, but their bytes differ; "
                    "nothing was published."
                )


def _owners(inventory: Inventory, pieces: list[dict[str, Piece]]) -> list[int]:
    """The rank that publishes each tensor: the largest first, each to whoever has the least so far."""
    load = [0] * len(pieces)
    owners = [0] * len(inventory.tensors)
    for index in sorted(range(len(owners)), key=lambda index: -inventory.tensors[index].nbytes):
        tensor = inventory.tensors[index]
        owner = min((rank for rank, held in enumerate(pieces) if tensor.name in held), key=lambda rank: load[rank])
        owners[index] = owner
        load[owner] += tensor.nbytes
    return owners


def _owned(
    rank: int, inventory: Inventory, owners: list[int], pieces: Mapping[str, Piece], values: Mapping[str, Any]
) -> dict[int, Bytes]:
    """The bytes of what this rank owns. Split tensors are gathered one after the other, in one order everywhere, and
    kept by their owner alone.
    """
    bits: dict[int, Bytes] = {}
    for index, tensor in enumerate(inventory.tensors):
        piece = pieces.get(tensor.name)
        if piece is None:
            continue
        value = values[tensor.name]
        if piece.split:
            value = value.full_tensor()
        if owners[index] == rank:
            bits[index] = _host_bits(tensor.name, value)
    return bits


def _host_bits(name: str, value: Any) -> Bytes:
    local = value.to_local() if hasattr(value, "to_local") else value
    flat: Bytes = bits_of(name, local, {})[0].reshape(-1).view(np.uint8)
    return flat
