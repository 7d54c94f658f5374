"""What others make of our codes: transformers and compressed-tensors read them, and agree with their own quantisers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mailboat.checkpoint.source import ArraySource
from mailboat.quantise.source import QuantisedSource
from tests.quantise.models import bf16, tensor

WEIGHTS = bf16(np.random.default_rng(11).normal(size=(256, 384)) * 0.03)
# Half the distance between the codes nearest to a group's largest magnitude, as a share of it.
COARSEST = {"fp8-block": 1 / 28, "fp8-channel": 1 / 28, "nvfp4": 1 / 5, "mxfp4": 1 / 5, "int4": 1 / 14}


def quantised(format: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    import json

    held = QuantisedSource(ArraySource({"x.weight": WEIGHTS}, dtypes={"x.weight": "BF16"}), format)
    kinds = {
        "F8_E4M3": torch.float8_e4m3fn,
        "F32": torch.float32,
        "U8": torch.uint8,
        "I32": torch.int32,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
    }
    found = {}
    for t in held.inventory.tensors:
        found[t.name.removeprefix("x.")] = torch.from_numpy(tensor(held, t.name)).view(kinds[t.dtype]).reshape(t.shape)
    return found, json.loads(held.read_side("config.json"))["quantization_config"]


def originals() -> torch.Tensor:
    return torch.from_numpy(WEIGHTS.view(np.int16)).view(torch.bfloat16).float()


def assert_close(found: torch.Tensor, format: str, group: int) -> None:
    weights = originals()
    amax = weights.abs().view(256, -1, group).amax(dim=2, keepdim=True).expand(-1, -1, group).reshape(256, 384)
    if format == "fp8-block":
        amax = weights.abs().max()
    # A little more than that, because some read into BF16.
    assert ((found.float() - weights).abs() <= amax * COARSEST[format] * 1.15).all()
    error = ((found.float() - weights).pow(2).mean() / weights.pow(2).mean()).sqrt()
    assert error < (0.04 if format.startswith("fp8") else 0.15)


def test_fp8_blocks_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    ours, config = quantised("fp8-block")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    theirs = Fp8Quantize(quantizer).convert({"x.weight": originals()})
    assert torch.equal(theirs["x.weight"].view(torch.uint8), ours["weight"].view(torch.uint8))
    # torch divides 448 by a tensor as 448 x (1 / tensor): its scales may be off by one last bit.
    torch.testing.assert_close(theirs["x.weight_scale_inv"], ours["weight_scale_inv"], rtol=2.0**-22, atol=0)
    back = Fp8Dequantize(quantizer).convert(
        {"x.weight": [ours["weight"]], "x.weight_scale_inv": [ours["weight_scale_inv"]]}
    )
    (plain,) = back.values()
    assert_close(plain[0] if isinstance(plain, list) else plain, "fp8-block", 384)
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]


def compressed_tensors(config: dict[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    return scheme


@pytest.mark.parametrize(("format", "group"), [("fp8-channel", 384), ("mxfp4", 32), ("int4", 128)])
def test_compressed_tensors_reads_our_codes(format: str, group: int) -> None:
    from compressed_tensors.compressors import BaseCompressor

    ours, config = quantised(format)
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    back = compressor.decompress(ours, compressed_tensors(config))["weight"]
    assert_close(back, format, group)


def test_mxfp4_codes_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    ours, config = quantised("mxfp4")
    scheme = compressed_tensors(config)
    groups = originals().view(256, 12, 32)
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.compress({"weight": originals(), "weight_scale": scale.float()}, scheme)
    assert torch.equal(theirs["weight_scale"], ours["weight_scale"])
    # They write +0 for what rounds to zero from below; the numbers are the same.
    assert torch.equal(unpacked(theirs["weight_packed"]), unpacked(ours["weight_packed"]))


def test_nvfp4_codes_mean_what_the_format_says() -> None:
    """ModelOpt's NVFP4: E2M1 code x E4M3 scale of 16 x FP32 scale of the tensor."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    ours, config = quantised("nvfp4")
    assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "W4A16_NVFP4", 16)
    codes = unpack_fp4_from_uint8(ours["weight"], 256, 384, dtype=torch.float32)
    assert torch.equal(codes, unpacked(ours["weight"]))
    scales = ours["weight_scale"].float().repeat_interleave(16, dim=1)
    assert ours["weight_scale_2"].shape == ()
    assert_close(codes * scales * ours["weight_scale_2"], "nvfp4", 16)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(256, 384).long()
    return table[codes]
