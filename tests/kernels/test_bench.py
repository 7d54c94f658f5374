"""bench/kernels: silent without a GPU, and a script that runs where there is one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import WANTED

SCRIPT = Path(__file__).resolve().parents[2] / "bench/kernels"


def load(monkeypatch: pytest.MonkeyPatch) -> object:
    loader = importlib.machinery.SourceFileLoader("bench_kernels", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_kernels", loader))
    monkeypatch.setitem(sys.modules, "bench_kernels", module)
    loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels"])
    assert bench.main() == 0
    assert "no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kernels", "--json"])
    assert bench.main() == 0
    assert json.loads(capsys.readouterr().out) == {"device": None, "kernels": []}


@pytest.mark.long
@pytest.mark.skipif(WANTED != "interpreter", reason="a GPU runs the script itself")
def test_every_row_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a small size, through the interpreter; its times mean nothing."""
    bench = load(monkeypatch)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    rows = bench.Bench("cpu", 32 * 256, 256)
    rows.run()
    assert [row.kernel for row in rows.rows] == [
        "copy", "diff + compact", "tensor sums", "scatter", "apply + sums", "scan-decode", "refresh bf16",
        "refresh fp8 128 x 128", "refresh fp8 by row", "refresh nvfp4", "refresh mxfp4", "refresh int4",
    ]  # fmt: skip
    assert all(row.exact for row in rows.rows)
