"""What a checkpoint declares about its tensors: tied names, units of codes and scales, the quantiser.

Declarations come from names and from config.json.  Nothing is ever inferred from equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from mailboat import canonical
from mailboat.checkpoint.inventory import Inventory
from mailboat.errors import CheckpointError, InventoryMismatch

CONFIG = "config.json"
_MAX_DEPTH = 64

# Input embedding -> the output head that tie_word_embeddings ties to it.
_TIED = {
    "model.embed_tokens.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "lm_head.weight",
    "model.decoder.embed_tokens.weight": "lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "transformer.word_embeddings.weight": "lm_head.weight",
    "backbone.embeddings.weight": "lm_head.weight",
    "gpt_neox.embed_in.weight": "embed_out.weight",
}
# Suffix of the codes -> suffixes of what belongs to them.
_UNITS = {
    ".weight": (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".input_scale"),
    ".weight_packed": (".weight_scale", ".weight_global_scale", ".weight_shape", ".input_global_scale"),
    "_blocks": ("_scales",),
}


def parse_config(data: bytes) -> dict[str, Any]:
    """Parse config.json (floats allowed, duplicate keys refused); raise CheckpointError when it isn't an object."""
    try:
        if canonical.depth(data) > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        config = json.loads(data.decode(), object_pairs_hook=canonical.unique_pairs)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{CONFIG} can't be read as JSON: {str(problem).splitlines()[0][:200]}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG} does not hold an object.")
    return config


def declared_aliases(config: bytes | None, names: Collection[str]) -> dict[str, str]:
    """Return {head: embedding} when config.json ties them and exactly one known embedding is among `names`."""
    if config is None:
        return {}
    parsed = parse_config(config)
    text = parsed.get("text_config")
    tied = parsed.get("tie_word_embeddings") is True or (
        isinstance(text, dict) and text.get("tie_word_embeddings") is True
    )
    present = [name for name in _TIED if name in names]
    return {_TIED[present[0]]: present[0]} if tied and len(present) == 1 else {}


def quantiser_text(config: bytes | None) -> str | None:
    """Return config.json's quantization_config as JSON with sorted keys, or None."""
    found = parse_config(config).get("quantization_config") if config is not None else None
    return None if found is None else json.dumps(found, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def check_config(inventory: Inventory, *, before: bytes | None, after: bytes | None) -> None:
    """Refuse a changed or removed config.json (`after`) with which the same tensors would be another model.

    Its ties have to be among the inventory's aliases and keep those that the config.json `before` declared; the
    quantiser has to be the inventory's. Raises CheckpointError when `after` can't be read, else InventoryMismatch.
    """
    names = {*(tensor.name for tensor in inventory.tensors), *inventory.aliases}
    declared = declared_aliases(after, names).items()
    kept = declared_aliases(before, names).items() & inventory.aliases.items()
    if not (kept <= declared <= inventory.aliases.items()):
        raise InventoryMismatch(
            f"The new {CONFIG} does not tie what the model ties; keep it, or publish the model as a new run."
        )
    if quantiser_text(after) != inventory.quantiser:
        raise InventoryMismatch(
            f"The new {CONFIG} names another quantiser than the model has; keep it, or publish the model as a new run."
        )


def units(names: Iterable[str]) -> dict[str, str]:
    """Return {tensor name: unit} for codes that stand beside their scales; the unit is the codes' common stem."""
    present = set(names)
    found: dict[str, str] = {}
    for name in present:
        for codes, companions in _UNITS.items():
            if not name.endswith(codes):
                continue
            stem = name.removesuffix(codes)
            members = [stem + suffix for suffix in companions if stem + suffix in present]
            if members:
                found.update(dict.fromkeys([name, *members], stem))
    return found
