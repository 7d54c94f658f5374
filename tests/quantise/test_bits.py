"""The CPU's quantisers give the bits of the kernels' twins, whatever is read in which order."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import numbers, reference
from mailboat.checkpoint.source import ArraySource
from mailboat.errors import CheckpointError
from mailboat.quantise import FORMATS
from mailboat.quantise.schemes import is_linear
from mailboat.quantise.source import QuantisedSource
from tests.quantise.models import bf16, masters, source, tensor

KINDS = {"nvfp4": numbers.NVFP4, "mxfp4": numbers.MXFP4, "int4": numbers.INT4}


def expected(bits: np.ndarray, format: str, group: int) -> dict[str, np.ndarray]:
    if format.startswith("fp8"):
        block = (128, 128) if format == "fp8-block" else (1, bits.shape[1])
        codes, scales, _ = reference.quantise_fp8(bits, block)
        return {"weight": codes, "weight_scale_inv" if format == "fp8-block" else "weight_scale": scales}
    packed, scales, whole, _ = reference.quantise_groups(bits, KINDS[format], group)
    found = {"weight" if format == "nvfp4" else "weight_packed": packed, "weight_scale": scales}
    return found | ({"weight_scale_2": whole} if format == "nvfp4" else {})


def awkward() -> dict[str, np.ndarray]:
    """Every finite BF16 pattern, in order and shuffled, and a matrix whose sizes are no multiples of a block."""
    every = np.arange(65536, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    shuffled = np.random.default_rng(3).permutation(finite)
    size = finite.size // 128 * 128
    odd = bf16(np.random.default_rng(4).normal(size=(261, 160)))
    return {
        "a.weight": finite[:size].reshape(-1, 128),
        "b.weight": shuffled[:size].reshape(128, -1)[:, :384].copy(),
        "c.weight": odd,
    }


@pytest.mark.parametrize("format", FORMATS)
def test_cpu_equals_the_twin(format: str) -> None:
    arrays = awkward()
    quantised = QuantisedSource(ArraySource(arrays, dtypes=dict.fromkeys(arrays, "BF16")), format)
    assert quantised.scheme.weights == ("a.weight", "b.weight", "c.weight")
    for stem in "abc":
        for suffix, value in expected(arrays[f"{stem}.weight"], format, quantised.scheme.group).items():
            np.testing.assert_array_equal(
                tensor(quantised, f"{stem}.{suffix}"), np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            )


@pytest.mark.parametrize("format", FORMATS)
def test_any_piece_of_any_tensor_can_be_read_alone(format: str) -> None:
    quantised = QuantisedSource(source(masters()), format)
    generator = np.random.default_rng(1)
    for index, described in enumerate(quantised.inventory.tensors):
        whole = tensor(quantised, described.name)
        for _ in range(12):
            low, high = sorted(generator.integers(0, described.nbytes + 1, 2).tolist())
            piece = np.empty(high - low, np.uint8)
            quantised.read(index, low, piece)
            np.testing.assert_array_equal(piece, whole[low:high])


@pytest.mark.parametrize("format", FORMATS)
def test_small_stripes_give_the_same_bytes(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        t.name: tensor(q, t.name) for q in [QuantisedSource(source(masters()), format)] for t in q.inventory.tensors
    }
    monkeypatch.setattr("mailboat.quantise.source._STRIPE", 1 << 12)
    striped = QuantisedSource(source(masters()), format)
    for name, value in whole.items():
        np.testing.assert_array_equal(tensor(striped, name), value)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_wider_weights_are_taken_as_bf16(format: str, kind: str) -> None:
    values = masters()["model.layers.0.self_attn.q_proj.weight"].astype(np.float16 if kind == "F16" else np.float32)
    wide = QuantisedSource(ArraySource({"x.weight": values}), format)
    narrow = QuantisedSource(ArraySource({"x.weight": bf16(values)}, dtypes={"x.weight": "BF16"}), format)
    assert wide.inventory.to_bytes() == narrow.inventory.to_bytes()
    for described in wide.inventory.tensors:
        np.testing.assert_array_equal(tensor(wide, described.name), tensor(narrow, described.name))


@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_are_refused_by_name(format: str) -> None:
    for problem in (0x7F80, 0xFF80, 0x7FC1):
        bits = bf16(np.ones((32, 128)))
        bits[5, 7] = problem
        quantised = QuantisedSource(ArraySource({"x.weight": bits}, dtypes={"x.weight": "BF16"}), format)
        with pytest.raises(CheckpointError, match=r"x\.weight holds NaN"):
            tensor(quantised, quantised.inventory.tensors[0].name)


def test_what_is_quantised_follows_from_names_and_shapes() -> None:
    names = {
        "model.layers.0.self_attn.q_proj.weight": True, "model.layers.0.mlp.gate_proj.weight": True,
        "encoder.layer.3.attention.output.dense.weight": True, "pooler.dense.weight": True,
        "model.embed_tokens.weight": False, "embeddings.word_embeddings.weight": False, "lm_head.weight": False,
        "model.layers.0.mlp.gate.weight": False, "model.layers.0.block_sparse_moe.router.weight": False,
        "transformer.wte.weight": False, "model.layers.0.post_attention_layernorm.weight": False,
        "model.layers.0.self_attn.q_proj.bias": False,
    }  # fmt: skip
    held = ArraySource(
        {name: bf16(np.ones((4, 32)) * i) for i, name in enumerate(names)}, dtypes=dict.fromkeys(names, "BF16")
    )
    assert {t.name: is_linear(t) for t in held.inventory.tensors} == names


def test_rows_that_are_no_whole_groups_stay_as_they_are() -> None:
    arrays = {"a.weight": bf16(np.ones((4, 64))), "b.weight": bf16(np.ones((4, 40)))}
    held = ArraySource(arrays, dtypes=dict.fromkeys(arrays, "BF16"))
    assert QuantisedSource(held, "mxfp4").scheme.weights == ("a.weight",)
    assert QuantisedSource(held, "int4").scheme.group == 32
    assert QuantisedSource(held, "fp8-channel").scheme.weights == ("a.weight", "b.weight")


def test_what_is_quantised_already_is_refused() -> None:
    once = QuantisedSource(source(masters()), "fp8-block")
    with pytest.raises(CheckpointError, match="quantised already"):
        QuantisedSource(once, "fp8-block")
    scaled = ArraySource({"x.weight": np.ones((4, 32), np.float32), "x.weight_scale": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"x\.weight_scale already"):
        QuantisedSource(scaled, "nvfp4")


def test_a_checkpoint_without_linear_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no linear weights"):
        QuantisedSource(ArraySource({"model.norm.weight": np.ones(8, np.float32)}), "fp8-block")
