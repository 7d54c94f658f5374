"""`bench/servable`: its rows, and that it fails where the planner takes a way that is much longer than the best."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SERVABLE = Path(__file__).parents[3] / "bench" / "servable"
STEADY = {"contextual": (342_151, 3.3), "positional": (532_309, 10.5), "xor_zstd1": (991_809, 3.3)}


def run(folder: Path, **other: tuple[int, float]) -> tuple[int, Any]:
    """Exit status and document for codecs' {name: (bytes, gigabytes per second)}."""
    codecs = {name: {"bytes": size, "apply_gbps": speed} for name, (size, speed) in (STEADY | other).items()}
    found = {"changed": 353_457, "elements": 134_515_008, "full_bytes": 269_030_016, "codecs": codecs}
    path = folder / "codec.txt"
    path.write_text(f"a table\n{json.dumps(found)}\n")
    command = [sys.executable, str(SERVABLE), "--codec", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_rows_for_links_cores_and_models(tmp_path: Path) -> None:
    status, found = run(tmp_path)
    assert (status, len(found["rows"])) == (0, 6 * 3 * 4)
    assert {row["planned"] for row in found["rows"]} == {"contextual", "positional"}
    for row in found["rows"]:
        assert set(row["seconds"]) == set(STEADY)
        assert row["best"] == min(row["seconds"], key=row["seconds"].get)
        assert row["excess"] == pytest.approx(row["seconds"][row["planned"]] / row["seconds"][row["best"]] - 1)
        assert row["excess"] <= found["worst_excess"] <= 0.05
    slow = next(row for row in found["rows"] if (row["cores"], row["link_gbits"]) == (8, 0.1))
    more_cores = 1 + 7 * 0.7
    assert slow["seconds"]["contextual"] == pytest.approx(342_151 * 8 / 1e8 + 0.269030016 / 3.3 / more_cores, rel=1e-6)


def test_it_fails_where_the_choice_is_much_worse_than_the_best(tmp_path: Path) -> None:
    status, found = run(tmp_path, xor_zstd1=(1000, 30.0))
    assert status == 1 and found["worst_excess"] > 0.05


@pytest.mark.parametrize("speed", [1.0, 5.0, 30.0])
def test_the_choice_follows_what_a_machine_is_quick_with(tmp_path: Path, speed: float) -> None:
    status, found = run(tmp_path, positional=(532_309, speed))
    assert status == 0
    assert any(row["planned"] == "positional" for row in found["rows"]) == (speed > 1)
