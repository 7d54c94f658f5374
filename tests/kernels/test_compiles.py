"""What the interpreter can't see: the kernels compile for a real GPU, and nothing in their arithmetic may be fused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def said_by(module: str, cache: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    said = said_by("compile_all", tmp_path)
    assert "_refresh_fp8_block" in said and "_positions" in said


def test_kernels_count_beyond_2_to_the_31_where_sizes_are_below(tmp_path: Path) -> None:
    assert "kernels count in 64 bits" in said_by("narrow", tmp_path)


def test_counting_in_32_bits_is_noticed() -> None:
    """As Triton wrote the row kernel when its loop began at a plain 0."""
    from tests.kernels.narrow import overflows

    loop = "scf.for %start = %c0_i32 to %columns step %c2048_i32  : i32 {"
    added = "%column_2 = arith.addi %column_1, %column : tensor<2048xi32>"
    lines = [
        'tt.func public @_rows(%master: !tt.ptr<i32> loc("master"(#loc)), %columns: i32 loc("columns"(#loc))) {', loop,
        "%column = tt.make_range {end = 2048 : i32, start = 0 : i32} : tensor<2048xi32> loc(#loc2)",
        "%column_1 = tt.splat %start : i32 -> tensor<2048xi32> loc(#loc2)", added,
        "%wide = arith.extsi %columns : i32 to i64", "%twice = arith.addi %wide, %wide : i64",
    ]  # fmt: skip
    assert list(overflows("\n".join(lines))) == [loop, added]
    product = "%all = arith.muli %columns, %columns : i32"
    assert list(overflows("\n".join([lines[0], product]))) == [product]
