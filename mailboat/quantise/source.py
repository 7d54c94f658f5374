"""A checkpoint as it would be when quantised, read stripe by stripe: written, published or compared without a copy.

Memory: a stripe of rows (4 MiB of BF16, or 128 rows where they are longer) and some copies of it, for each reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mailboat.checkpoint.declared import CONFIG, parse_config, quantiser_text, units
from mailboat.checkpoint.inventory import COMPONENT, Inventory, Tensor
from mailboat.checkpoint.side_files import SideFile, side_file, sorted_side_files
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.errors import CheckpointError
from mailboat.patch.backends import on_device
from mailboat.quantise import arithmetic, compiled
from mailboat.quantise.arithmetic import FP8_BLOCK, Weights
from mailboat.quantise.schemes import Scheme, kept_modules

_STRIPE = 4 << 20


@dataclass(frozen=True, slots=True)
class _Output:
    """What a tensor of the result is made of: `role` as in Scheme.outputs, or "copy"; `index` in the source."""

    role: str
    index: int


class QuantisedSource:
    """`source` in another format; a TensorSource. Every tensor that `scheme` does not name is passed on bit for bit.

    config.json says what was done and by whom; it is made where the source has none. Reading raises CheckpointError
    where a weight is NaN or infinite.
    """

    def __init__(self, source: TensorSource, format: str) -> None:
        self._source = source
        self.scheme = Scheme.of(format, source.inventory)
        chosen = set(self.scheme.weights)
        rows: list[tuple[tuple[str, str, tuple[int, ...], int | None], _Output]] = []
        for index, tensor in enumerate(source.inventory.tensors):
            if tensor.name in chosen:
                rows += [((n, d, s, None), _Output(role, index)) for role, n, d, s in self.scheme.outputs(tensor)]
            else:
                rows.append(((tensor.name, tensor.dtype, tensor.shape, tensor.stored), _Output("copy", index)))
        self._config = self._make_config(kept_modules(source.inventory, chosen))
        grouped = units(row[0][0] for row in rows)
        self._inventory = Inventory.of(
            (Tensor(COMPONENT, n, d, s, grouped.get(n), stored) for (n, d, s, stored), _ in rows),
            source.inventory.aliases,
            quantiser_text(self._config),
        )
        made = {row[0][0]: row[1] for row in rows}
        self._outputs = [made[tensor.name] for tensor in self._inventory.tensors]
        others = [file for file in source.side_files if file.path != CONFIG]
        self._side_files = sorted_side_files([*others, side_file(CONFIG, self._config)])
        self._magnitudes: dict[int, int] = {}

    def _make_config(self, kept: list[str]) -> bytes:
        """The source's config.json with a quantization_config at its end."""
        held = any(file.path == CONFIG for file in self._source.side_files)
        config = parse_config(self._source.read_side(CONFIG)) if held else {}
        config["quantization_config"] = self.scheme.config(kept)
        return (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode()

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self._inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        return self._side_files

    def read_side(self, path: str) -> bytes:
        """Return a side file whole."""
        return self._config if path == CONFIG else self._source.read_side(path)

    def check_unchanged(self) -> None:
        """Raise CheckpointChanged when the source is a checkpoint that changed since it was opened."""
        if check := getattr(self._source, "check_unchanged", None):
            check()

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`."""
        output = self._outputs[index]
        if output.role == "copy":
            self._source.read(output.index, offset, out)
        elif output.role in {"codes", "scales"}:
            self._read_rows(output, self._inventory.tensors[index], offset, out)
        else:
            shape = self._source.inventory.tensors[output.index].shape
            whole = self._tensor_scale(output.index) if output.role == "tensor_scale" else np.array(shape, "<i8")
            out[:] = np.frombuffer(whole.tobytes(), np.uint8)[offset : offset + out.size]

    def _read_rows(self, output: _Output, made: Tensor, offset: int, out: Bytes) -> None:
        """Make the rows that the bytes lie in, a stripe at a time; a row of FP8 block scales is 128 rows of weights."""
        weights = self._source.inventory.tensors[output.index]
        rows, columns = weights.shape
        unit = FP8_BLOCK if self.scheme.format == "fp8-block" else 1
        per_row = unit if unit > 1 and output.role == "scales" else 1
        first = offset // made.row_bytes * per_row // unit * unit
        last = min(rows, -(-(offset + out.size) // made.row_bytes) * per_row)
        step = max(1, _STRIPE // (2 * columns) // unit) * unit
        for row in range(first, last, step):
            count = min(step, -(-(last - row) // unit) * unit, rows - row)
            stripe = self._make(output, self._weights(output.index, row, count))
            begin = row // per_row * made.row_bytes
            low, high = max(offset, begin), min(offset + out.size, begin + stripe.size)
            out[low - offset : high - offset] = stripe[low - begin : high - begin]

    def _make(self, output: _Output, weights: Weights) -> Bytes:
        """The bytes of codes or scales of a stripe."""
        scheme, codes = self.scheme, output.role == "codes"
        result: NDArray[Any]
        if (device := on_device()) is not None:
            amax = self._largest(output.index) if scheme.format == "nvfp4" else 0
            result = device.quantise(weights, scheme.format, scheme.group, amax)[0 if codes else 1]
        elif scheme.format in {"fp8-block", "fp8-channel"}:
            block = scheme.block[0], scheme.block[1] or weights.shape[1]
            factors, stored = arithmetic.fp8_scales(weights, block)
            result = arithmetic.fp8_codes(weights, factors, block) if codes else stored
        elif scheme.format == "nvfp4":
            scales, factors = arithmetic.nvfp4_scales(weights, self._tensor_scale(output.index))
            result = arithmetic.nvfp4_codes(weights, factors) if codes else scales
        elif scheme.format == "mxfp4":
            scales = arithmetic.mxfp4_scales(weights)
            result = arithmetic.mxfp4_codes(weights, scales) if codes else scales
        else:
            bf16, factors = arithmetic.int4_scales(weights, scheme.group)
            result = arithmetic.int4_codes(weights, factors) if codes else bf16
        return result.reshape(-1).view(np.uint8)

    def _tensor_scale(self, index: int) -> np.float32:
        """NVFP4's scale of a whole tensor."""
        return arithmetic.nvfp4_tensor_scale(self._largest(index))

    def _largest(self, index: int) -> int:
        """BF16 bits of a tensor's largest magnitude, found in a pass of its own, once."""
        if index not in self._magnitudes:
            self._magnitudes[index] = max(int((stripe & np.uint16(0x7FFF)).max()) for stripe in self._stripes(index))
        return self._magnitudes[index]

    def _stripes(self, index: int) -> Iterator[Weights]:
        rows, columns = self._source.inventory.tensors[index].shape
        step = max(1, _STRIPE // (2 * columns))
        return (self._weights(index, row, min(step, rows - row)) for row in range(0, rows, step))

    def _weights(self, index: int, row: int, count: int) -> Weights:
        """Rows of a weight, cast to BF16. Raises CheckpointError for NaN and infinity."""
        tensor = self._source.inventory.tensors[index]
        raw = np.empty(count * tensor.row_bytes, np.uint8)
        self._source.read(index, row * tensor.row_bytes, raw)
        weights = _bf16(raw, tensor.dtype).reshape(count, tensor.shape[1])
        if ((weights & np.uint16(arithmetic.INFINITY)) == np.uint16(arithmetic.INFINITY)).any():
            raise CheckpointError(f"{tensor.name} holds NaN, infinity or values beyond BF16; it can't be quantised.")
        return weights


def _bf16(raw: Bytes, dtype: str) -> Weights:
    if dtype == "BF16":
        return raw.view(np.uint16)
    wide = raw.view(np.float16).astype(np.float32) if dtype == "F16" else raw.view(np.float32)
    out = np.empty(wide.size, np.uint16)
    compiled.cast_bf16(wide.view(np.uint32), out)
    return out
