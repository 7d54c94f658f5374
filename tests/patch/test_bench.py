"""`bench/codec --json` ends with one line of just the promised keys, whatever the tensors are; `bench/catchup` says
what it needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mailboat.checkpoint.inventory import DTYPE_BITS
from tests.patch.models import changed, random_bits, source, written

ROOT = Path(__file__).parents[2]
CODECS = {"contextual", "positional", "xor_zstd1", "int32_values", "u16gap_zstd1", "zstd_patch_from", "zstd_full"}
FIGURES = {"bytes", "encode_gbps", "apply_gbps", "encode_gbps_all", "apply_gbps_all", "peak_mib"}


def test_the_last_line_has_the_promised_keys_for_every_dtype(tmp_path: Path) -> None:
    before = {dtype: (dtype, (24, 40), random_bits(dtype, (24, 40), 1)) for dtype in DTYPE_BITS}
    before |= {
        "scalar": ("F32", (), random_bits("F32", (), 2)),
        "none": ("BF16", (0, 4), random_bits("BF16", (0, 4), 3)),
    }
    after = {
        name: (dtype, shape, changed(bits, max(1, DTYPE_BITS[dtype] // 8), 0.2, 4))
        for name, (dtype, shape, bits) in before.items()
    }
    folders = [written(tmp_path, "base", source(before)), written(tmp_path, "target", source(after))]
    command = [sys.executable, str(ROOT / "bench/codec"), *map(str, folders), "--json", "--rounds", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert set(found) == {"changed", "elements", "full_bytes", "bounds", "codecs"}
    assert set(found["bounds"]) == {"no_context", "contextual"}
    assert set(found["codecs"]) == CODECS
    assert all(set(figures) == FIGURES for figures in found["codecs"].values())
    assert 0 < found["changed"] < found["elements"]


@pytest.mark.parametrize("versions", [None, 0, 1])
def test_catching_up_needs_versions_and_says_so_in_one_sentence(tmp_path: Path, versions: int | None) -> None:
    folder = tmp_path / "run"
    if versions is not None:
        folder.mkdir()
    for number in range(versions or 0):
        (folder / f"v{number:03}").mkdir()
    command = [sys.executable, str(ROOT / "bench/catchup"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{folder} holds fewer than two versions; it needs vNNN/model.safetensors of each.\n"
