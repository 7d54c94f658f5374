"""Who holds what among the ranks of a training job, and which rank publishes it.

Each tensor has one owner, so it is published exactly once; replicas are proven equal, bit for bit, before anything is
published. It must never choose between replicas that differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.declared import CONFIG, declared_aliases
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile, side_file
from mailboat.checkpoint.source import Bytes, Described, described_inventory, tied_names
from mailboat.digest import State, measure
from mailboat.errors import CheckpointError, MailboatError
from mailboat.image import Image
from mailboat.patch.blocks import Positions
from mailboat.trainer.in_place import Found, OldBytes, OnDevice, on_accelerator, replica_sums
from mailboat.trainer.ranks import Alone, Ranks
from mailboat.trainer.served import ServedWeights
from mailboat.trainer.tensors import NamedTensors, bits_of, kind_of

Shard = tuple[str, tuple[int, ...]]  # a tensor's name, and which of its shards
Held: TypeAlias = Bytes | OnDevice | Found


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor: ranks with the same `shard` hold the same bytes. `split`: there is more of it
    elsewhere. `place`: where it lies in this rank's memory; None where it holds nothing of it. `summed`: its sums can
    be computed there.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    split: bool
    place: Hashable | None
    summed: bool


class StaleChanges(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """What was found on an accelerator does not lead from the copy to the tensors; they are to be compared anew."""

    code = "stale_changes"


class OwnedSource:
    """The tensors that one rank owns, under the inventory of all; reading another rank's is a defect.

    Each is held as bytes, lies on an accelerator, or is known by its changes alone and can't be read.
    """

    def __init__(self, inventory: Inventory, side: Mapping[str, bytes], held: Mapping[int, Held]) -> None:
        self.inventory = inventory
        self.side_files: tuple[SideFile, ...] = tuple(side_file(path, side[path]) for path in sorted(side))
        self.indices = tuple(sorted(held))
        self._side, self._held = side, held

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        held = self._held[index]
        if isinstance(held, OnDevice):
            held.read(offset, out)
            return
        assert isinstance(held, np.ndarray)  # noqa: S101
        out[:] = held[offset : offset + out.size]

    def changed(self, index: int, first: int, elements: int) -> tuple[Positions, Bytes] | None:
        """What may have changed in a block, where that is known."""
        held = self._held[index]
        return held.inside(first, elements) if isinstance(held, Found) else None

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        return self._side[path]

    def prove(self, built: State) -> None:
        """Compare the sums of what was built from changes with those of the tensors where they lie.

        Raises StaleChanges: base and changes do not make up the tensor.
        """
        for index, held in self._held.items():
            if isinstance(held, Found) and tuple(built.sums[index].tolist()) != held.sums:
                raise StaleChanges(
                    f"{self.inventory.tensors[index].name} changed in a way that was not noticed; publish again."
                )

    def nothing(self) -> State:
        """The state without its rows, to be filled in."""
        count = len(self.inventory.tensors)
        return State(self.inventory, np.zeros((count, 2), np.uint64), np.zeros((count, 32), np.uint8), self.side_files)

    def measure(self) -> State:
        """The state, of which only the rows of what is owned are right."""
        state = self.nothing()
        if self.indices:
            found = measure(_Part(self))
            state.sums[[*self.indices]], state.strong[[*self.indices]] = found.sums, found.strong
        return state


class _Part:
    """What a rank owns as a source of its own, to be measured."""

    def __init__(self, own: OwnedSource) -> None:
        self.inventory = Inventory.of((own.inventory.tensors[index] for index in own.indices), {})
        self.side_files: tuple[SideFile, ...] = ()
        self._own = own

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        self._own.read(self._own.indices[index], offset, out)

    def read_side(self, path: str) -> bytes:
        """There are none."""
        raise KeyError(path)


@dataclass(frozen=True)
class Holdings:
    """The tensors of all ranks: their inventory, and each one's owner."""

    inventory: Inventory
    owners: list[int]
    _rank: int
    _pieces: Mapping[str, Piece]
    _values: Mapping[str, Any]
    _side: Mapping[str, bytes]
    _served: ServedWeights | None

    @classmethod
    def of(cls, ranks: Ranks | Alone, named_tensors: NamedTensors, side: Mapping[str, bytes]) -> Holdings:
        """Called by all ranks. A rank may hold tensors that others lack.

        Raises CheckpointError with the tensor's name where ranks hold other shapes or other bytes for one tensor.
        """
        values: dict[str, Any] = {}
        served = named_tensors if isinstance(named_tensors, ServedWeights) else None

        def look() -> dict[str, Piece]:
            if served is not None:
                served.recheck()
            for name, value in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
                _take(values, name, value.detach() if hasattr(value, "detach") else value)
            return {name: _piece(name, value) for name, value in values.items()}

        pieces = ranks.together(look)
        described = _described(pieces)
        config = side.get(CONFIG)
        tied = _tied(pieces, described, config)
        _prove_equal(ranks, pieces, values, tied)
        inventory = described_inventory(described, tied, config)
        return cls(inventory, _owners(inventory, pieces), ranks.rank, pieces[ranks.rank], values, side, served)

    def whole(self) -> OwnedSource:
        """What this rank owns, to be read. Called by all ranks: split tensors are gathered, one after the other, in one
        order everywhere, and kept by their owner alone.
        """
        held: dict[int, Held] = {}
        for index, name, value in self._gathered():
            if on_accelerator(value) and not self._pieces[name].split:
                held[index] = OnDevice(value)
            else:
                held[index] = _host_bits(name, value)
        return OwnedSource(self.inventory, self._side, held)

    def changes(self, image: Image, old: OldBytes) -> OwnedSource:
        """The same as a target for a patch from `image`, which has the same inventory: what lies on an accelerator is
        compared there, or not at all where the served view knows what can have changed. To be proven once it is built.
        """
        held: dict[int, Held] = {}
        known = {} if self._served is None else self._served.since(image.digest)
        old.begin(image)
        for index, name, value in self._gathered():
            if not on_accelerator(value):
                held[index] = _host_bits(name, value)
                continue
            split = self._pieces[name].split
            found = old.find(image, index, value, None if split else known.get(name))
            held[index] = found or (_host_bits(name, value) if split else OnDevice(value))
        return OwnedSource(self.inventory, self._side, held)

    def built(self, old: OldBytes, base: str | None, target: str) -> None:
        """What the ranks hold is the state `target`, made from `base`: the next patch starts from one of the two."""
        old.end(target)
        if self._served is not None:
            self._served.mark(base, target)

    def distrust(self, old: OldBytes) -> None:
        """What was found is not proven: the next time everything is compared with the copy."""
        old.forget()
        if self._served is not None:
            self._served.forget()

    def _gathered(self) -> Iterator[tuple[int, str, Any]]:
        """(index, name, this rank's tensor, put together where it is split) of what this rank owns."""
        for index, tensor in enumerate(self.inventory.tensors):
            piece = self._pieces.get(tensor.name)
            if piece is None:
                continue
            value = self._values[tensor.name]
            if piece.split:
                value = value.full_tensor()
            if self.owners[index] == self._rank:
                yield index, tensor.name, value.to_local() if hasattr(value, "to_local") else value


def _take(values: dict[str, Any], name: str, value: Any) -> None:
    """Note a tensor; a name that comes again must come with equal bytes."""
    if name in values:
        same = kind_of(name, values[name]) == kind_of(name, value)
        if not same or not np.array_equal(_host_bits(name, values[name]), _host_bits(name, value)):
            raise CheckpointError(f"{name} was given twice with different bytes; give each tensor once.")
        return
    values[name] = value


def _piece(name: str, value: Any) -> Piece:
    dtype, shape = kind_of(name, value)
    if not hasattr(value, "to_local"):
        return Piece(dtype, shape, (), False, _place(value), on_accelerator(value))
    mesh, placements = value.device_mesh, value.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f"{name} is a sum that is not made yet; reduce it before it is published.")
    split = [not placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(placements)]
    shard = tuple(at for at, is_split in zip(mesh.get_coordinate(), split, strict=True) if is_split)
    local = value.to_local()
    place = _place(local)
    return Piece(dtype, shape, shard, any(split), place and (place, shape), on_accelerator(local))


def _place(value: Any) -> Hashable | None:
    if isinstance(value, np.ndarray):
        return (
            (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str) if value.size else None
        )
    if not value.numel():
        return None
    view = tuple(value.shape), value.stride(), str(value.dtype), value.is_conj(), value.is_neg()
    return str(value.device), value.data_ptr(), *view


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
    ranks: Ranks | Alone, pieces: list[dict[str, Piece]], values: Mapping[str, Any], tied: Mapping[str, str]
) -> None:
    """Compare whatever lies in more than one place: replicas, and names of one tensor. By their sums where each of them
    lies on an accelerator, else by their digests, for which one tensor at a time is copied to the host.
    """
    places: dict[Shard, set[tuple[int, Hashable]]] = {}
    summed: dict[Shard, bool] = {}
    split: dict[str, bool] = {}
    for rank, held in enumerate(pieces):
        for name, piece in held.items():
            tensor = tied.get(name, name)
            if split.setdefault(tensor, piece.split) != piece.split:
                raise CheckpointError(f"{name} is split on some ranks and whole on others; hold it in one way.")
            if piece.place is not None:
                shard = tensor, piece.shard
                places.setdefault(shard, set()).add((rank, piece.place))
                summed[shard] = summed.get(shard, True) and piece.summed

    def digest() -> dict[str, bytes]:
        shards = {
            name: (tied.get(name, name), piece.shard) for name, piece in pieces[ranks.rank].items() if piece.place
        }
        return {name: told(name, shard) for name, shard in shards.items() if len(places[shard]) > 1}

    def told(name: str, shard: Shard) -> bytes:
        value = values[name].to_local() if hasattr(values[name], "to_local") else values[name]
        return replica_sums(value) if summed[shard] else blake3(_host_bits(name, value).data).digest()

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


def _host_bits(name: str, value: Any) -> Bytes:
    flat: Bytes = bits_of(name, value, {})[0].reshape(-1).view(np.uint8)
    return flat
