"""Compares an island's checkpoint with the trainer's own, tensor by tensor, with the safetensors package alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def differences(own: Path, island: Path) -> list[str]:
    """What differs between two checkpoint folders, in words; empty when every byte is the same."""
    found = []
    with safe_open(own / "model.safetensors", "pt") as ours, safe_open(island / "model.safetensors", "pt") as theirs:
        ours_names, theirs_names = set(ours.keys()), set(theirs.keys())
        found += [f"tensor {name} is on one side only" for name in sorted(ours_names ^ theirs_names)]
        for name in sorted(ours_names & theirs_names):
            a, b = ours.get_tensor(name), theirs.get_tensor(name)
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
                found.append(f"tensor {name} differs")
    sides = {
        p.name
        for folder in (own, island)
        for p in folder.iterdir()
        if p.suffix != ".safetensors" and not p.name.startswith(".")  # dot names are no part of a state
    }
    for name in sorted(sides):
        files = [folder / name for folder in (own, island)]
        if not all(f.is_file() for f in files) or files[0].read_bytes() != files[1].read_bytes():
            found.append(f"side file {name} differs")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Integers, not floats: -0.0 and +0.0 are different bytes, and a NaN equals itself here.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
