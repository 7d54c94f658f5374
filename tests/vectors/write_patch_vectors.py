"""Write the committed patch vectors: `python -m tests.vectors.write_patch_vectors`.

Bases and targets come from the plain twin's `content`; the patches are what the product wrote when the format was
frozen, checked here by the plain decoder. Readers must read them for ever; writers may choose other encodings later.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mailboat.checkpoint.source import ArraySource
from mailboat.patch import PartSpec, build_patch
from tests.patch.contextual_reference import classes
from tests.patch.models import source, tensor_bytes
from tests.patch.reference import Part
from tests.vectors.write_vectors import content

_LONG = 1 << 16
FILE = Path(__file__).parent / "patch.json"
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def _moved(data: bytes, width: int, every: int, steps: tuple[int, ...]) -> bytes:
    """Every so many elements moved by the next of some steps in unsigned order."""
    out = bytearray(data)
    for number, at in enumerate(range(width * (every // 2), len(data) - width + 1, width * every)):
        value = int.from_bytes(data[at : at + width], "little") + steps[number % len(steps)]
        out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(out)


def _moved_by_class(dtype: str, data: bytes, width: int) -> bytes:
    """Nearly every element of a few classes moved, by one step or far."""
    shift, mask, _ = classes(dtype)
    out = bytearray(data)
    for number, at in enumerate(range(0, len(data) - width + 1, width)):
        value = int.from_bytes(data[at : at + width], "little")
        if ((value >> shift) & mask) % 30 == 3 and number % 11:
            value += (1, -1, 1, -1, 2, 1, 9999)[number % 7]
            out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(out)


def _cases() -> dict[str, tuple[Tensors, Tensors, dict[str, bytes], dict[str, bytes], list[tuple[int, ...]]]]:
    every = {
        "bf16": ("BF16", (20, 30)), "f16": ("F16", (7, 50)), "f32": ("F32", (90,)), "f64": ("F64", (3, 40)),
        "fp8": ("F8_E5M2", (21, 11)), "scale": ("F8_E8M0", (99,)), "int": ("I32", (5, 5, 5)), "byte": ("I8", (130,)),
        "packed": ("F4", (9, 34)), "complex": ("C64", (40,)), "flag": ("BOOL", (64,)), "scalar": ("F32", ()),
        "none": ("BF16", (0, 4)),
    }  # fmt: skip
    widths = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "C64": 8}
    sizes = {
        name: int(np.prod(shape)) * widths.get(dtype, 1) // (2 if dtype == "F4" else 1)
        for name, (dtype, shape) in every.items()
    }
    base = {name: (dtype, shape, content(name, sizes[name])) for name, (dtype, shape) in every.items()}
    steps = (1, -1, 2, 127, -127, 128, -128, 9999)
    sparse = {n: (d, s, _moved(data, widths.get(d, 1), 19, steps)) for n, (d, s, data) in base.items()}
    dense = {n: (d, s, content(n + " dense", len(data))) for n, (d, s, data) in base.items()}
    shifted = {n: (d, s, _moved(data, widths.get(d, 1), 1, (1, 1, 2))) for n, (d, s, data) in base.items()}
    cleared = {n: (d, s, bytes(len(data))) for n, (d, s, data) in base.items()}
    wide = {
        "bf16": ("BF16", (40, 61)), "fp8": ("F8_E4M3", (61, 41)), "f32": ("F32", (1031,)), "int": ("I16", (31, 33)),
        "packed": ("U8", (41, 50)), "f64": ("F64", (300,)), "more": ("BF16", (1301,)), "f16": ("F16", (700, 2)),
    }  # fmt: skip
    lengths = {n: int(np.prod(shape)) * (widths | {"I16": 2}).get(dtype, 1) for n, (dtype, shape) in wide.items()}
    weights = {n: (dtype, shape, content(n, lengths[n])) for n, (dtype, shape) in wide.items()}
    moved = {
        n: (d, s, _moved_by_class(d, data, (widths | {"I16": 2}).get(d, 1))) for n, (d, s, data) in weights.items()
    }
    return {
        "contextual": (weights, moved, {}, {}, []),
        "empty": (base, base, {}, {}, []),
        "sparse": (base, sparse, {}, {}, []),
        "random bits": (base, dense, {}, {}, []),
        "cleared": (base, cleared, {}, {}, []),
        "every element by a step": (base, shifted, {}, {}, []),
        "several blocks": (_long(a=5), _long(a=5, b=1_048_580, c=2_097_160, d=900_000), {}, {}, []),
        "side files": (base, base, {"a.txt": b"1", "gone.txt": b""}, {"a.txt": b"2", "n\u00e4me/b": b""}, []),
        "three parts": (base, sparse, {"a": b"1"}, {"a": b"2"}, [(0, 5, 12), (1, 2, 3, 4), (6, 7, 8, 9, 10, 11)]),
    }


def packed(data: bytes) -> Any:
    """How bytes stand in the file: hex, or for long tensors their size and what is not zero as [offset, hex]."""
    if len(data) <= _LONG:
        return data.hex()
    places = np.flatnonzero(np.frombuffer(data, np.uint8)).tolist()
    return {"size": len(data), "set": [[at, data[at : at + 1].hex()] for at in places]}


def unpacked(value: Any) -> bytes:
    """Undo `packed`."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    data = bytearray(value["size"])
    for at, piece in value["set"]:
        data[at : at + 1] = bytes.fromhex(piece)
    return bytes(data)


def _long(**changes: int) -> Tensors:
    """Tensors of several blocks: rows longer than a block, and rows that fill blocks; zeros but for some bytes."""
    shapes = {"long rows": (2, 1_048_581), "rows": (5, 450_000)}
    tensors = {}
    for name, shape in shapes.items():
        data = bytearray(shape[0] * shape[1])
        for at in changes.values():
            data[at] = 255
        tensors[name] = ("U8", shape, bytes(data))
    return tensors


def _source(tensors: Tensors, side_files: dict[str, bytes]) -> ArraySource:
    arrays = {n: (d, s, np.frombuffer(data, np.uint8).copy()) for n, (d, s, data) in tensors.items()}
    return source(arrays, side_files)


def _case(name: str, folder: Path) -> dict[str, Any]:
    before, after, side_before, side_after, split = _cases()[name]
    base, target = _source(before, side_before), _source(after, side_after)
    specs = [PartSpec(i, len(split), indices) for i, indices in enumerate(split)] or [None]
    parts = [build_patch(base, target, folder / "p", part=spec).path.read_bytes() for spec in specs]
    decoded: dict[int, bytes] = {}
    for part in parts:
        decoded |= Part(part).apply(tensor_bytes(base))
    assert decoded == {i: data for i, (_, data) in enumerate(tensor_bytes(target))}
    return {
        "name": name,
        "tensors": [
            [t.name, t.dtype, list(t.shape), packed(old), packed(new)]
            for t, (_, old), (_, new) in zip(
                base.inventory.tensors, tensor_bytes(base), tensor_bytes(target), strict=True
            )
        ],
        "side_files": [{path: data.hex() for path, data in side.items()} for side in (side_before, side_after)],
        "from": Part(parts[0]).metadata["from"],
        "to": Part(parts[0]).metadata["to"],
        "parts": [part.hex() for part in parts],
    }


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [_case(name, Path(folder)) for name in _cases()]
    FILE.write_text(json.dumps({"cases": cases}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
