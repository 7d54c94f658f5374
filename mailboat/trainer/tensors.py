"""Named tensors of a training process as bytes of this host.

Bits are viewed, never converted: no float is ever read as a number. A tensor that is not on the CPU, or not contiguous,
is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mailboat.checkpoint.source import ArraySource, describe
from mailboat.errors import CheckpointError

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

# torch's name of a dtype -> safetensors' name, and how many of safetensors' elements one of torch's holds.
_TORCH = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
_PACKED = {"F4": 2}


def tensor_source(tensors: NamedTensors, side_files: Mapping[str, bytes]) -> ArraySource:
    """Named torch tensors or NumPy arrays, and side files by POSIX path, as a source.

    Names that share their storage are declared aliases and held once. A name that comes twice must come with equal
    bytes. The source holds views of the tensors: they must rest until the version is built. Raises CheckpointError.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}
    for name, value in pairs:
        array, dtype, shape = bits_of(name, value, shared)
        if name in arrays:
            same = (dtypes.get(name), shapes[name]) == (dtype, shape)
            if not same or not np.array_equal(_flat(arrays[name]), _flat(array)):
                raise CheckpointError(f"{name} was given twice with different bytes; give each tensor once.")
            continue
        arrays[name], shapes[name] = array, shape
        if dtype is not None:
            dtypes[name] = dtype
    if not arrays:
        raise CheckpointError("No tensor was given; there is nothing to publish.")
    return ArraySource(arrays, dtypes=dtypes, shapes=shapes, side_files=side_files)


def bits_of(
    name: str, value: Any, shared: dict[tuple[Any, ...], np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], str | None, tuple[int, ...]]:
    """The bits of one tensor, the safetensors dtype where NumPy's does not say it, and the shape."""
    if isinstance(value, np.ndarray):
        dense = np.ascontiguousarray(value).reshape(value.shape)
        if dense is not value and value.size and not value.flags.c_contiguous:
            key = (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str)
            dense = shared.setdefault(key, dense)
        return dense, None, tuple(value.shape)
    return _torch_bits(_torch_of(name, value), name, value.detach(), shared)


def kind_of(name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    """Safetensors' dtype and shape of a tensor, without its bits; a distributed tensor's are those of the whole."""
    if isinstance(value, np.ndarray):
        return describe(name, value, None, None)[:2]
    return _torch_kind(_torch_of(name, value), name, value)


def require_whole(name: str, value: Any) -> None:
    """Raise CheckpointError for a tensor that other processes have a part in."""
    if hasattr(value, "to_local") and value.device_mesh.size() > 1:
        raise CheckpointError(f"{name} lies on several ranks; publish it with RankedPublisher, on all of them.")


def _torch_of(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{name} is a {type(value).__name__}; give torch tensors or NumPy arrays.")
    return torch


def _torch_kind(torch: Any, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    dtype = _TORCH.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or value.layout != torch.strided:
        raise CheckpointError(f"{name} is a {value.dtype} tensor ({value.layout}), which can't be published.")
    shape = tuple(value.shape)
    if dtype in _PACKED:
        if not shape:
            raise CheckpointError(f"{name} is a packed scalar, which can't be published.")
        shape = (*shape[:-1], shape[-1] * _PACKED[dtype])
    return dtype, shape


def _torch_bits(
    torch: Any, name: str, value: Any, shared: dict[tuple[Any, ...], np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], str, tuple[int, ...]]:
    dtype, shape = _torch_kind(torch, name, value)
    require_whole(name, value)
    if hasattr(value, "to_local"):
        value = value.to_local()
    # One and the same view of one storage gives one and the same array, so that names of tied tensors are seen as tied
    # even where a copy has to be made.
    storage = value.untyped_storage()
    key = (str(value.device), storage.data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), dtype,
           value.is_conj(), value.is_neg())  # fmt: skip
    if value.numel() == 0:
        return np.empty(0, np.uint8), dtype, shape
    if key not in shared:
        dense = value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        shared[key] = dense.view(torch.uint8).numpy()
    return shared[key], dtype, shape


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)
