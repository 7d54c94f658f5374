"""Build safetensors files byte by byte, valid or not, without the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int], bytes]]


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with any header (JSON value, or bytes as they are) and any claimed length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def safetensors(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """A valid file: {name: (dtype, shape, bytes)} in the given order, without any alignment."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return raw_file(header, data)


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    """One tensor's entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def folder(path: Path, shards: dict[str, Tensors], *, side: dict[str, bytes] | None = None, index: bool = True) -> Path:
    """A checkpoint folder; with `index`, every tensor is named in model.safetensors.index.json."""
    path.mkdir(parents=True)
    for name, tensors in shards.items():
        (path / name).write_bytes(safetensors(tensors, {"format": "pt", "shard": name}))
    if index:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        text = json.dumps({"metadata": {"total_size": 1.5}, "weight_map": weight_map}, indent=2)
        (path / "model.safetensors.index.json").write_text(text)
    for name, content in (side or {}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path
