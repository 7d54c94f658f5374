"""Refreshing stores into the served tensors what changed and nothing else: equal bytes too would be traffic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.numbers import INT4, MXFP4, NVFP4
from tests.kernels.conftest import WANTED

GROUPS = {"nvfp4": (NVFP4, 16), "mxfp4": (MXFP4, 32), "int4": (INT4, 64)}
ROWS, COLUMNS = 9, 192


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that kernels store to."""
    if WANTED != "interpreter":
        pytest.skip("only the interpreter tells where a kernel stores")
    from triton.runtime import interpreter

    addresses: set[int] = set()
    store = interpreter.InterpreterBuilder.create_masked_store

    def noted(builder: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses.update(places.data[mask.data].tolist())
        return store(builder, places, value, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", noted)
    return addresses


def served_in(format: str) -> list[torch.Tensor]:
    """Elements or codes, scales, and a scale of the whole tensor."""
    if format in {"bf16", "fp16"}:
        return [torch.zeros((ROWS, COLUMNS), dtype=torch.int16)]
    if format in GROUPS:
        kind, group = GROUPS[format]
        scales = torch.zeros((ROWS, COLUMNS // group), dtype=torch.int16 if kind == INT4 else torch.uint8)
        return [torch.zeros((ROWS, COLUMNS // 2), dtype=torch.uint8), scales, torch.zeros(1)]
    scales = torch.zeros((ROWS, 1) if format == "fp8-channel" else (1, 2))
    return [torch.zeros((ROWS, COLUMNS), dtype=torch.uint8), scales]


def refresh_in(format: str, master: torch.Tensor, served: list[torch.Tensor]) -> list[Any]:
    """The changes of each served tensor."""
    from kernels import refresh

    if format in GROUPS:
        return list(refresh.refresh_groups(master, served[0], served[1], served[2], *GROUPS[format])[:3])
    if format.startswith("fp8"):
        block = (1, COLUMNS) if format == "fp8-channel" else (128, 128)
        return list(refresh.refresh_fp8(master, served[0], served[1], block)[:2])
    return [getattr(refresh, f"refresh_{format}")(master, served[0])]


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8-block", "fp8-channel", *GROUPS])
def test_only_what_changed_is_stored(stored: set[int], format: str) -> None:
    random = np.random.default_rng(3)
    master = torch.from_numpy(random.standard_normal((ROWS, COLUMNS)).astype(np.float32))
    master[0, 150] = 30.0  # the largest, on which NVFP4's scales all depend
    served = served_in(format)
    refresh_in(format, master, served)
    master[5, 7], master[8, 180:] = 20.0, 0.25
    before = [tensor.clone() for tensor in served]
    stored.clear()
    found = refresh_in(format, master, served)
    for old, tensor, changes in zip(before, served, found, strict=True):
        start = tensor.data_ptr()
        places = {(at - start) // tensor.element_size() for at in stored if start <= at < start + tensor.nbytes}
        assert places == set(changes.positions.tolist())
        changed = torch.nonzero((old != tensor).view(-1)).view(-1)
        assert places == set(changed.tolist()) and len(places) < tensor.numel()
    assert all(changes.positions.numel() for changes in found[:2])
    stored.clear()
    refresh_in(format, master, served)
    assert not any(start <= at < start + part.nbytes for part in served for start in [part.data_ptr()] for at in stored)
