"""The formats: which tensors they take, what stands in their place, and what config.json says about it.

Names and meanings are those that engines read: DeepSeek's and transformers' `fp8`, compressed-tensors, ModelOpt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from mailboat.checkpoint.inventory import Inventory, Tensor
from mailboat.errors import CheckpointError
from mailboat.quantise.arithmetic import FP8_BLOCK

# Raised whenever the same weights would give other bytes.
VERSION = 1
WEIGHT = ".weight"
FLOATS = frozenset({"BF16", "F16", "F32"})
_GROUPS = {"nvfp4": 16, "mxfp4": 32}
_INT4_GROUPS = (128, 64, 32)
# Parts of a name that mark what is no linear layer, or one that is left exact: heads, routers of experts.
_KEPT_WORDS = ("embed", "norm")
_KEPT_PARTS = frozenset({
    "wte", "wpe", "lm_head", "ln_f", "ln_1", "ln_2", "router", "gate", "shared_expert_gate", "score", "classifier",
    "relative_attention_bias",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """One format as it applies to one inventory: `group` is the number of weights of a row that share a scale.

    `weights` are the names of the tensors to quantise, sorted.
    """

    format: str
    group: int
    weights: tuple[str, ...]

    @classmethod
    def of(cls, format: str, inventory: Inventory) -> Scheme:
        """Choose the tensors; raise CheckpointError when there are none, or when they are quantised already."""
        if inventory.quantiser is not None:
            raise CheckpointError("The checkpoint is quantised already; start from the BF16 one.")
        shared = set(inventory.aliases.values())
        linear = [t for t in inventory.tensors if is_linear(t) and t.name not in shared]
        group = _GROUPS.get(format, 0)
        if format == "int4":
            group = next((g for g in _INT4_GROUPS if all(t.shape[1] % g == 0 for t in linear)), _INT4_GROUPS[-1])
        chosen = [t.name for t in linear if not group or t.shape[1] % group == 0]
        if not chosen:
            raise CheckpointError(
                f"The checkpoint has no linear weights for {format}; give one with matrices in BF16, F16 or F32."
            )
        scheme = cls(format, group, tuple(chosen))
        _check_free(inventory, scheme)
        return scheme

    @property
    def identity(self) -> dict[str, Any]:
        """Who made the codes, and with which parameters: equal identities and weights give equal bytes."""
        sizes: dict[str, Any] = {"group": self.group} if self.group else {}
        if self.format == "fp8-block":
            sizes = {"block": [FP8_BLOCK, FP8_BLOCK]}
        return {"cast": "bf16", "format": self.format, "quantiser": "mailboat", "version": VERSION, **sizes}

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Return config.json's `quantization_config`; `kept`: names of the modules that stay as they are."""
        ignored = sorted(kept)
        if self.format == "fp8-block":
            stated: dict[str, Any] = {
                "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": ignored,
            }  # fmt: skip
        elif self.format == "nvfp4":
            weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
            stated = {
                "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
                "producer": {"name": "mailboat", "version": str(VERSION)}, "ignore": ignored,
            }  # fmt: skip
        else:
            stated = _compressed_tensors(self.format, self.group) | {"ignore": ignored}
        return stated | {"mailboat": self.identity}

    def outputs(self, tensor: Tensor) -> tuple[tuple[str, str, str, tuple[int, ...]], ...]:
        """What stands in a weight's place: (role, name, dtype, shape); roles are codes, scales, tensor_scale, shape."""
        stem, (rows, columns) = tensor.name.removesuffix(WEIGHT), tensor.shape
        codes, scales = ("codes", stem + ".weight"), ("scales", stem + ".weight_scale")
        packed = ("codes", stem + ".weight_packed")
        if self.format == "fp8-block":
            blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            return (*codes, "F8_E4M3", tensor.shape), ("scales", stem + ".weight_scale_inv", "F32", blocks)
        if self.format == "fp8-channel":
            return (*codes, "F8_E4M3", tensor.shape), (*scales, "F32", (rows, 1))
        grouped = rows, columns // self.group
        if self.format == "nvfp4":
            return (
                (*codes, "U8", (rows, columns // 2)), (*scales, "F8_E4M3", grouped),
                ("tensor_scale", stem + ".weight_scale_2", "F32", ()),
            )  # fmt: skip
        if self.format == "mxfp4":
            return (*packed, "U8", (rows, columns // 2)), (*scales, "U8", grouped)
        return (
            (*packed, "I32", (rows, columns // 8)), (*scales, "BF16", grouped),
            ("shape", stem + ".weight_shape", "I64", (2,)),
        )  # fmt: skip

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns (0: all of them) of an FP8 scale."""
        return (FP8_BLOCK, FP8_BLOCK) if self.format == "fp8-block" else (1, 0)


def is_linear(tensor: Tensor) -> bool:
    """Whether a tensor is a linear layer's weight by its name, shape and dtype."""
    if not tensor.name.endswith(WEIGHT) or len(tensor.shape) != 2 or tensor.dtype not in FLOATS or not tensor.nbytes:
        return False
    parts = tensor.name.lower().split(".")[:-1]
    return not any(part in _KEPT_PARTS or any(word in part for word in _KEPT_WORDS) for part in parts)


def kept_modules(inventory: Inventory, chosen: Collection[str]) -> list[str]:
    """Names of the modules whose weights stay: everything with a matrix for a weight, tied heads included."""
    names = [t.name for t in inventory.tensors if len(t.shape) > 1 and t.name not in chosen] + list(inventory.aliases)
    return sorted({name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT)})


def _compressed_tensors(format: str, group: int) -> dict[str, Any]:
    weights: dict[str, Any] = {"dynamic": False, "symmetric": True}
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if format == "fp8-channel":
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
        scheme["input_activations"] = {
            "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True
        }  # fmt: skip
        name = "float-quantized"
    elif format == "mxfp4":
        weights |= {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": group, "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        }  # fmt: skip
        name = "mxfp4-pack-quantized"
    else:
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
        name = "pack-quantized"
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
    }  # fmt: skip


def _check_free(inventory: Inventory, scheme: Scheme) -> None:
    """Refuse names that are taken: whoever has scales beside its weights is quantised already, or not plain."""
    weights = set(scheme.weights)
    taken = {tensor.name for tensor in inventory.tensors} - weights | set(inventory.aliases)
    for tensor in inventory.tensors:
        clash = [out[1] for out in scheme.outputs(tensor) if out[1] in taken] if tensor.name in weights else []
        if clash:
            raise CheckpointError(f"The checkpoint has {clash[0]} already; start from one that is not quantised.")
