"""Torch tensors as bits: every dtype, layout and kind of sharing."""

from __future__ import annotations

import numpy as np
import pytest

from mailboat.checkpoint.source import ArraySource
from mailboat.errors import CheckpointError
from mailboat.trainer.tensors import tensor_source

torch = pytest.importorskip("torch")


def content(source: ArraySource) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each tensor."""
    return {
        tensor.name: (tensor.dtype, tensor.shape, source.view(index).tobytes())
        for index, tensor in enumerate(source.inventory.tensors)
    }


def test_a28_every_bf16_pattern_survives() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    weight = torch.from_numpy(patterns.view(np.int16).copy()).view(torch.bfloat16).reshape(256, 256)
    assert content(tensor_source({"w": weight}, {}))["w"] == ("BF16", (256, 256), patterns.tobytes())


def test_a28_every_fp8_pattern_survives() -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    for dtype, name in [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2")]:
        assert content(tensor_source({"w": patterns.view(dtype)}, {}))["w"] == (name, (256,), bytes(range(256)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64", "bool", "complex64"])
def test_dtypes_are_those_of_safetensors(dtype: str) -> None:
    from safetensors.torch import save

    weight = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    import json

    raw = save({"w": weight})
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    kind, shape, data = content(tensor_source({"w": weight}, {}))["w"]
    assert (kind, list(shape)) == (header["w"]["dtype"], header["w"]["shape"])
    assert data == raw[8 + int.from_bytes(raw[:8], "little") :]


def test_strided_scalar_empty_parameter_and_conjugate() -> None:
    grid = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    imaginary = torch.tensor([1 + 2j], dtype=torch.complex64)
    found = content(
        tensor_source(
            {
                "t": grid.t(),
                "every": grid[:, ::2],
                "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
                "empty": torch.zeros(0, 5),
                "parameter": torch.nn.Parameter(grid.clone()),
                "conj": imaginary.conj(),
            },
            {},
        )
    )
    assert found["t"][2] == grid.t().contiguous().numpy().tobytes()
    assert found["every"][2] == grid[:, ::2].contiguous().numpy().tobytes()
    assert found["scalar"] == ("BF16", (), b"\x20\x40")
    assert found["empty"] == ("F32", (0, 5), b"")
    assert found["parameter"][2] == grid.numpy().tobytes()
    assert found["conj"][2] == np.array([1 - 2j], np.complex64).tobytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_a26_tied_tensors_are_held_once(transposed: bool) -> None:
    weight = torch.randn(4, 6)
    tied = weight.t() if transposed else weight
    source = tensor_source(
        {"lm_head.weight": tied, "model.embed_tokens.weight": tied.detach(), "other": tied.clone()}, {}
    )
    assert [tensor.name for tensor in source.inventory.tensors] == ["model.embed_tokens.weight", "other"]
    assert source.inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a26_views_of_one_storage_that_differ_are_no_aliases() -> None:
    weight = torch.randn(4, 6)
    source = tensor_source({"a": weight[:2], "b": weight[2:], "c": weight.reshape(6, 4)}, {})
    assert len(source.inventory.tensors) == 3
    assert not source.inventory.aliases


def test_a26_replicas_must_be_equal() -> None:
    weight = torch.randn(4)
    source = tensor_source([("w", weight), ("w", weight.clone())], {})
    assert len(source.inventory.tensors) == 1
    with pytest.raises(CheckpointError, match="twice"):
        tensor_source([("w", weight), ("w", weight + 1)], {})
    with pytest.raises(CheckpointError, match="twice"):
        tensor_source([("w", torch.tensor([0.0])), ("w", torch.tensor([-0.0]))], {})


def test_a27_head_tied_by_config_is_an_alias_on_either_side() -> None:
    config = {"config.json": b'{"tie_word_embeddings": true}'}
    weight = torch.randn(4, 6)
    stored = tensor_source({"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}, config)
    absent = tensor_source({"model.embed_tokens.weight": weight}, config)
    assert stored.inventory.digest == absent.inventory.digest
    with pytest.raises(CheckpointError, match="differ"):
        tensor_source({"model.embed_tokens.weight": weight, "lm_head.weight": weight + 1}, config)


def test_what_can_not_be_published_is_said() -> None:
    for value in (torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128), [1.0], None):
        with pytest.raises(CheckpointError, match="w"):
            tensor_source({"w": value}, {})


def test_numpy_strides_are_copied() -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = content(tensor_source({"t": grid.T, "b": grid[:, 1:3]}, {}))
    assert found["t"] == ("F32", (4, 3), np.ascontiguousarray(grid.T).tobytes())
    assert found["b"][2] == np.ascontiguousarray(grid[:, 1:3]).tobytes()
