"""What goes wrong outside the patch: full disks, checkpoints that change, too little memory."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mailboat.checkpoint.files import Checkpoint
from mailboat.commands.patch import command
from mailboat.digest import measure
from mailboat.errors import CheckpointChanged, DiskFull
from mailboat.patch import build as build_module
from mailboat.patch import build_patch, inspect
from mailboat.patch import encoder as encoder_module
from mailboat.patch.format import rice_parameter, rice_parameters
from tests.patch.models import changed, random_bits, source, written

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def pair(folder: Path, side_files: dict[str, bytes] | None = None) -> tuple[Path, Path]:
    """Base and target as folders."""
    bits = random_bits("BF16", (700, 256), 1)
    base = source({"t": ("BF16", (700, 256), bits)}, side_files)
    target = source({"t": ("BF16", (700, 256), changed(bits, 2, 0.5, 2, step=0))}, side_files)
    return written(folder, "base", base), written(folder, "target", target)


class _Full:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_full_disk_while_spooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    base, target = pair(tmp_path)
    original = encoder_module.tempfile.TemporaryFile
    monkeypatch.setattr(encoder_module.tempfile, "TemporaryFile", lambda **options: _Full(original(**options), room))
    full = pytest.raises(DiskFull, match=r"^The disk .*\.$")
    with Checkpoint.open(base) as before, Checkpoint.open(target) as after, full:
        build_patch(before, after, tmp_path / "patch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "target"]


def test_a_full_disk_while_finishing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = pair(tmp_path)
    (tmp_path / "patch").write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build_module.os, "fsync", full)
    with Checkpoint.open(base) as before, Checkpoint.open(target) as after, pytest.raises(DiskFull):
        build_patch(before, after, tmp_path / "patch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "patch", "target"]
    assert (tmp_path / "patch").read_bytes() == b"old"


def _write(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: _write(folder / "model.safetensors"),
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        lambda folder: (folder / "a.txt").write_bytes(b"22"),
        lambda folder: (folder / "a.txt").unlink(),
        lambda folder: (folder / "b.txt").write_bytes(b"new"),
    ],
)
@pytest.mark.parametrize("which", ["base", "target"])
def test_a_checkpoint_that_changes_while_it_is_read(tmp_path: Path, change: Callable[[Path], None], which: str) -> None:
    base, target = pair(tmp_path, {"a.txt": b"1"})
    with Checkpoint.open(base) as before, Checkpoint.open(target) as after:
        state = measure(before)

        def meddle(_: int) -> None:
            change(tmp_path / which)

        with pytest.raises(CheckpointChanged):
            build_patch(before, after, tmp_path / "patch", base_state=state, progress=meddle)
    assert not (tmp_path / "patch").exists()


def _bench() -> ModuleType:
    loader = SourceFileLoader("bench_patch", str(ROOT / "bench" / "patch"))
    spec = importlib.util.spec_from_loader("bench_patch", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("share", [pytest.param(0.01, marks=pytest.mark.long), 1.0])
def test_memory_does_not_follow_the_tensor(tmp_path: Path, share: float) -> None:
    """One tensor of 192 MiB: anonymous memory stays well below even one copy of it."""
    bench = _bench()
    base, target = tmp_path / "base.safetensors", tmp_path / "target.safetensors"
    bench.write_random(base, 192 * MIB, tensors=1, seed=1)
    bench.write_changed(base, target, share, seed=2)
    for task in ("build", "apply", "image", *(["merge"] if share == 1.0 else [])):
        arguments = [
            sys.executable,
            str(ROOT / "bench" / "patch"),
            "--child",
            task,
            str(base),
            str(target),
            str(tmp_path),
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["peak"] < (128 if task == "merge" else 160) * MIB


def test_parameters_are_the_same_one_by_one_and_together() -> None:
    random = np.random.default_rng(1)
    elements = random.integers(1, (1 << 20) + 1, 5000)
    counts = np.minimum(elements, random.integers(1, 1 << 20, 5000) >> random.integers(0, 20, 5000)).clip(1)
    together = rice_parameters(elements, counts).tolist()
    assert together == [rice_parameter(int(n), int(k)) for n, k in zip(elements, counts, strict=True)]


def test_positions_beat_xor_and_zstd_on_steps_like_training(tmp_path: Path) -> None:
    """0.3 % of the elements moved by one step: at most 0.55 times the field's bytes."""
    bench = _bench()
    bits = random_bits("BF16", (8192, 1024), 1)
    after = bits.copy().view(np.uint16)
    random = np.random.default_rng(2)
    at = random.integers(0, after.size, after.size * 3 // 1000)
    after[at] += random.choice(np.array([1, 65535], np.uint16), at.size)
    base = source({"t": ("BF16", (8192, 1024), bits)})
    target = source({"t": ("BF16", (8192, 1024), after.view(np.uint8))})
    size = build_patch(base, target, tmp_path / "patch").size
    assert size <= 0.55 * bench.xor_zstd(base, target)[0]


def test_the_commands(tmp_path: Path) -> None:
    base, target = pair(tmp_path, {"config.json": b"{}"})
    run = CliRunner()
    patch, out = str(tmp_path / "patch"), str(tmp_path / "out")
    assert run.invoke(command, ["build", str(base), str(target), "-o", patch]).exit_code == 0
    with Checkpoint.open(target) as checkpoint:
        digest = measure(checkpoint).digest
    applied = run.invoke(command, ["apply", str(base), patch, "-o", out])
    assert applied.exit_code == 0
    assert applied.output == digest + "\n"
    found = json.loads(run.invoke(command, ["inspect", patch, "--json", "--base", str(base)]).output)
    assert set(found) == {"from", "to", "codecs", "tensors", "totals"}
    assert found["to"] == digest
    (tensor,) = found["tensors"]
    assert set(tensor) == {"name", "dtype", "shape", "elements", "changed", "bytes", "encoding"}
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("t", "BF16", [700, 256])
    assert tensor["encoding"] in {"dense", "xor", "positional"}
    totals = found["totals"]
    assert totals["bytes"] == Path(patch).stat().st_size
    assert totals["full_bytes"] == 700 * 256 * 2
    assert totals["ratio"] == totals["bytes"] / totals["full_bytes"]
    assert totals["changed"] == tensor["changed"]
    assert 0 < totals["bytes"] - tensor["bytes"] < 2000
    nameless = json.loads(run.invoke(command, ["inspect", patch, "--json"]).output)
    assert nameless["tensors"][0] | {"name": "t", "dtype": "BF16", "shape": [700, 256]} == tensor
    assert nameless["tensors"][0]["name"] == "0"
    text = run.invoke(command, ["inspect", patch]).output
    assert "changed" in text
    assert digest in text
    assert run.invoke(command, ["build", str(base)]).exit_code == 2


def test_inspecting_a_mixed_tensor_names_every_encoding(tmp_path: Path) -> None:
    bits = random_bits("U8", (3 * MIB,), 1)
    after = bits.copy()
    after[:10] += 1
    after[2 * MIB :] = random_bits("U8", (MIB,), 9)
    base, target = source({"t": ("U8", (3 * MIB,), bits)}), source({"t": ("U8", (3 * MIB,), after)})
    build_patch(base, target, tmp_path / "patch")
    (row,) = inspect([tmp_path / "patch"], base.inventory)["tensors"]
    assert set(row["encoding"].split("+")) in ({"contextual", "dense"}, {"contextual", "xor"})
    build_patch(base, base, tmp_path / "same")
    assert inspect([tmp_path / "same"])["tensors"][0]["encoding"] == "same"
