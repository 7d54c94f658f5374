"""The RL demo through the real stack, with a tiny model: real web, workers, islands, engines and a real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.demonstration.rl.task import WORDS
from tests.demo.test_demo import DEADLINE, demo, demo_home
from tests.engines.models import tiny_llama
from tests.waiting import PATIENCE, free_port

__all__ = ["demo_home"]  # a fixture

END = "[END]"
ASKED = ("Write", "one", "short", "sentence", "with", "the", "word", ".", END)


@pytest.mark.long
def test_what_is_learnt_from_comes_from_islands_and_none_is_lost(demo_home: Path) -> None:
    model, out = demo_home / "model", demo_home / "result.json"
    tiny_llama(model, words=(*WORDS, *ASKED), end=END)
    arguments = ["--rl", "--versions", "2", "--islands", "2", "--model", str(model), "--json", str(out)]
    process = demo(demo_home, *arguments, "--port", str(free_port()))
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    result = json.loads(out.read_text())
    counts, versions = result["counts"], result["versions"]
    assert [version["number"] for version in versions] == [0, 1, 2]
    assert len({version["digest"] for version in versions}) == 3 and versions[1]["changed"] > 0
    # Two batches of six groups of eight, each within the budget, each sample's version known.
    assert sum(counts["by_version"].values()) == sum(counts["by_staleness"].values()) == 2 * 6 * 8
    assert set(map(int, counts["by_staleness"])) <= {0, 1, 2} and set(map(int, counts["by_version"])) <= {0, 1}
    assert counts["lost"] == counts["misstamped"] == 0 and sum(counts["answered"].values()) >= 18
    assert versions[1]["drift"]["0"] < 0.05  # what the engine says of its tokens is what the trainer computes
    assert result["after"]["samples"] == 6 * 8
    # The second island joined after the first version.
    assert "borealis-2 joins" in said and result["alike"] and not result["wrong"]
    assert [(island["version"], island["identical"]) for island in result["islands"]] == [(2, True), (2, True)]
    assert {job["state"] for job in result["jobs"]} == {"succeeded"} and len(result["jobs"]) == 3


def test_a_model_that_is_none_is_said_in_one_sentence(demo_home: Path) -> None:
    process = demo(demo_home, "--rl", "--versions", "1", "--model", str(demo_home))
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.count("\n") == 1 and "no checkpoint folder" in said
