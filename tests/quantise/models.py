"""Small models to quantise: random, with the odd cases that real ones have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint

Bits = np.ndarray[Any, Any]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}


def bf16(values: Bits) -> Bits:
    """Bits of values, to nearest even."""
    wide = values.astype(np.float32).view(np.uint32)
    return ((wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def masters(seed: int = 0) -> dict[str, Bits]:
    """FP32 weights by name: linear ones (also with rows that are no whole blocks), an embedding, norms."""
    generator = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (97, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.mlp.down_proj.weight": (64, 192),
        "model.layers.0.mlp.gate_proj.weight": (192, 64),
        "model.layers.0.self_attn.q_proj.weight": (300, 320),
        "model.layers.0.self_attn.q_proj.bias": (300,),
        "model.norm.weight": (64,),
    }
    return {name: (generator.normal(size=shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}


def step(weights: dict[str, Bits], seed: int, share: float = 0.01) -> dict[str, Bits]:
    """A training step: some weights move by about one BF16 step."""
    generator = np.random.default_rng(seed)
    return {
        name: np.where(generator.random(w.shape) < share, w * np.float32(1 + 1 / 128), w).astype(np.float32)
        for name, w in weights.items()
    }


def source(weights: dict[str, Bits], side_files: dict[str, bytes] | None = None) -> ArraySource:
    """The weights as BF16, in memory."""
    bits = {name: bf16(values) for name, values in weights.items()}
    return ArraySource(bits, dtypes=dict.fromkeys(bits, "BF16"), side_files=side_files or {})


def folder(path: Path, weights: dict[str, Bits]) -> Path:
    """The weights as a BF16 checkpoint folder with a config and a tokenizer."""
    side = {"config.json": json.dumps(CONFIG).encode(), "tokenizer/vocab.txt": b"a\nb\n"}
    write_checkpoint(source(weights, side), path)
    return path


def tensor(held: Any, name: str) -> Bits:
    """All bytes of one tensor of a source."""
    index = held.inventory.index(name)
    out = np.empty(held.inventory.tensors[index].nbytes, np.uint8)
    held.read(index, 0, out)
    return out
