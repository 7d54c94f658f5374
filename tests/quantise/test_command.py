"""`mailboat quantise` as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.cli import main
from mailboat.commands.quantise import command
from mailboat.digest import measure
from mailboat.quantise import FORMATS
from tests.quantise.models import CONFIG, bf16, folder, masters, tensor


def quantise(source: Path, out: Path, format: str) -> str:
    done = CliRunner().invoke(command, [str(source), "-o", str(out), "--format", format], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_becomes_a_checkpoint_that_says_what_it_is(tmp_path: Path, format: str) -> None:
    source = folder(tmp_path / "bf16", masters())
    assert "weights as" in quantise(source, tmp_path / "out", format)
    config = json.loads((tmp_path / "out/config.json").read_text())
    stated = config.pop("quantization_config")
    assert config == CONFIG
    assert stated["mailboat"]["quantiser"] == "mailboat" and stated["mailboat"]["version"] == 1
    assert stated["mailboat"]["format"] == format
    ignored = stated.get("ignore", stated.get("modules_to_not_convert"))
    assert "lm_head" in ignored and "model.embed_tokens" in ignored
    assert (tmp_path / "out/tokenizer/vocab.txt").read_bytes() == b"a\nb\n"
    with Checkpoint.open(source) as before, Checkpoint.open(tmp_path / "out") as after:
        assert after.inventory.quantiser is not None and '"mailboat"' in after.inventory.quantiser
        assert after.inventory.aliases == before.inventory.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
            np.testing.assert_array_equal(tensor(before, name), tensor(after, name))
        grouped = [t for t in after.inventory.tensors if t.unit == "model.layers.0.self_attn.q_proj"]
        assert len(grouped) == (3 if format in {"nvfp4", "int4"} else 2)


def test_a_lone_file_without_config_becomes_a_folder_with_one(tmp_path: Path) -> None:
    write_checkpoint(
        ArraySource({"x.weight": bf16(np.ones((8, 64)))}, dtypes={"x.weight": "BF16"}), tmp_path / "m.safetensors"
    )
    quantise(tmp_path / "m.safetensors", tmp_path / "out", "nvfp4")
    assert set(json.loads((tmp_path / "out/config.json").read_text())) == {"quantization_config"}
    with Checkpoint.open(tmp_path / "out") as made:
        assert [t.name for t in made.inventory.tensors] == ["x.weight", "x.weight_scale", "x.weight_scale_2"]


def test_twice_gives_the_same_state_and_shards_do_not_matter(tmp_path: Path) -> None:
    source = folder(tmp_path / "bf16", masters())
    digests = set()
    for out in ("one", "two"):
        quantise(source, tmp_path / out, "mxfp4")
        with Checkpoint.open(tmp_path / out) as made:
            digests.add(measure(made).digest)
    assert len(digests) == 1


def test_the_source_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "bf16", masters())
    before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
    for out in (source, source / "inside"):
        with pytest.raises(SystemExit) as ended:
            main(["quantise", str(source), "-o", str(out), "--format", "fp8-block"])
        assert ended.value.code == 1
        assert "overlaps" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == before


def test_nan_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = masters()
    weights["model.layers.0.mlp.down_proj.weight"][3, 5] = np.nan
    source = folder(tmp_path / "bf16", weights)
    with pytest.raises(SystemExit):
        main(["quantise", str(source), "-o", str(tmp_path / "out"), "--format", "fp8-block"])
    assert "down_proj.weight holds NaN" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


def test_an_unknown_format_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quantise", str(tmp_path), "-o", str(tmp_path / "out"), "--format", "fp3"])
    assert ended.value.code == 2
