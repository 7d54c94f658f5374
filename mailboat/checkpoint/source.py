"""Where tensor bytes come from: the one interface that digests, patches and writers read through.

A source gives bits by position in its inventory; it must never convert, reorder or pad them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mailboat.checkpoint.declared import CONFIG, declared_aliases, quantiser_text, units
from mailboat.checkpoint.inventory import COMPONENT, DTYPE_BITS, Inventory, Tensor, tensor_nbytes
from mailboat.checkpoint.side_files import SideFile, paths_problem, side_file
from mailboat.errors import CheckpointError

__all__ = ["ArraySource", "Bytes", "SideFile", "TensorSource"]

Bytes = NDArray[np.uint8]

_NUMPY_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip


class TensorSource(Protocol):
    """Tensors and side files of one state; `read` may be called from several threads at once."""

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        ...

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        ...

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        ...

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        ...


class ArraySource:
    """Named arrays in memory as a source; holds views, copies nothing.

    `arrays`: C-contiguous little-endian arrays. `dtypes` gives the safetensors dtype where NumPy has none (BF16 as
    uint16, FP8 as uint8); `shapes` the shape where the array's differs from it (packed dtypes). Names that share their
    storage, or that config.json among `side_files` ties, or that `aliases` lists, are held once. Raises CheckpointError
    for arrays that can't be viewed as bytes, sizes that do not fit, or tied tensors whose bytes differ.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        *,
        dtypes: Mapping[str, str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        side_files: Mapping[str, bytes] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._side = dict(sorted((side_files or {}).items()))
        if problem := paths_problem(list(self._side)):
            raise CheckpointError(f"The side files can't be published: {problem}.")
        views = {name: _byte_view(name, array) for name, array in arrays.items()}
        described = {
            name: describe(name, array, (dtypes or {}).get(name), (shapes or {}).get(name))
            for name, array in arrays.items()
        }
        config = self._side.get(CONFIG)
        tied = dict(aliases) if aliases is not None else _shared_storage(arrays) | declared_aliases(config, arrays)
        for alias, name in tied.items():
            if name not in views:
                raise CheckpointError(f"{alias} is declared as another name of {name}, which is not there.")
            if alias not in views:
                continue
            if described[alias][:2] != described[name][:2] or not np.array_equal(views[alias], views[name]):
                raise CheckpointError(f"{alias} and {name} are declared as one tensor, but their bytes differ.")
        self._inventory = described_inventory(described, tied, config)
        self._views = [views[tensor.name] for tensor in self._inventory.tensors]
        self._words: dict[int, NDArray[np.uint64] | None] = {}
        self._side_files = tuple(side_file(path, content) for path, content in self._side.items())

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self._inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        return self._side_files

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        out[:] = self._views[index][offset : offset + out.size]

    def view(self, index: int) -> Bytes:
        """Return all bytes of tensor `index` without a copy; they must not be written."""
        return self._views[index]

    def words(self, index: int) -> NDArray[np.uint64] | None:
        """Return the whole 64-bit words of tensor `index` without a copy, which must not be written.

        None where the memory is not aligned to them, or only lent for reading: compiled code takes no such arrays.
        """
        if index not in self._words:
            view = self._views[index]
            fits = view.ctypes.data % 8 == 0 and view.flags.writeable
            self._words[index] = view[: view.size // 8 * 8].view(np.uint64) if fits else None
        return self._words[index]

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        return self._side[path]


Described = tuple[str, tuple[int, ...], int | None]


def described_inventory(described: Mapping[str, Described], tied: Mapping[str, str], config: bytes | None) -> Inventory:
    """The inventory of tensors described by (safetensors dtype, shape, stored size for unknown dtypes), less `tied`."""
    kept = [name for name in described if name not in tied]
    grouped = units(kept)
    tensors = (Tensor(COMPONENT, n, described[n][0], described[n][1], grouped.get(n), described[n][2]) for n in kept)
    return Inventory.of(tensors, dict(tied), quantiser_text(config))


def tied_names(places: Mapping[str, Hashable]) -> dict[str, str]:
    """Map every further name of one and the same place in memory to its first name."""
    first: dict[Hashable, str] = {}
    tied: dict[str, str] = {}
    for name in sorted(places, key=_embeddings_first):
        if (kept := first.setdefault(places[name], name)) != name:
            tied[name] = kept
    return tied


def _byte_view(name: str, array: NDArray[Any]) -> Bytes:
    if not array.flags.c_contiguous:
        raise CheckpointError(f"{name} is not contiguous in memory; make it so before it is published.")
    if array.dtype.hasobject or array.dtype.byteorder == ">":
        raise CheckpointError(f"{name} has the dtype {array.dtype}, which can't be published.")
    view: Bytes = array.reshape(-1).view(np.uint8)
    return view


def describe(name: str, array: NDArray[Any], dtype: str | None, shape: tuple[int, ...] | None) -> Described:
    """What an array is as a tensor. Raises CheckpointError where NumPy does not say which bits these are."""
    dtype = dtype or _NUMPY_DTYPES.get(array.dtype.name)
    if dtype is None:
        raise CheckpointError(f"{name} has the dtype {array.dtype}; say which safetensors dtype its bits are.")
    shape = tuple(array.shape) if shape is None else tuple(shape)
    try:
        nbytes = tensor_nbytes(dtype, shape)
    except ValueError as problem:
        raise CheckpointError(f"{name} ({dtype}, {list(shape)}) can't be used: {problem}.") from None
    if nbytes is not None and nbytes != array.nbytes:
        raise CheckpointError(f"{name} has {array.nbytes} bytes, but {dtype} {list(shape)} takes {nbytes}.")
    return dtype, shape, array.nbytes if dtype not in DTYPE_BITS else None


def _shared_storage(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    return tied_names(
        {
            name: (array.__array_interface__["data"][0], array.shape, array.dtype.str)
            for name, array in arrays.items()
            if array.size
        }
    )


def _embeddings_first(name: str) -> tuple[bool, str]:
    # The head takes its bytes from the embedding, never the other way round: as config.json's rule has it.
    return name.rpartition(".")[0].endswith(("lm_head", "embed_out")), name
