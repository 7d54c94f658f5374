"""The committed patches read alike for ever: by the product, and by a decoder that knows only the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.patch import PartSpec, PatchFile, apply_patch, build_patch
from mailboat.patch.streams import ZSTD_VERSION
from tests.patch.models import source, tensor_bytes, written
from tests.patch.reference import Part
from tests.vectors.write_patch_vectors import unpacked

CASES = json.loads((Path(__file__).parent.parent / "vectors" / "patch.json").read_text())["cases"]


def sources(case: dict[str, Any]) -> tuple[ArraySource, ArraySource]:
    """Base and target of a case."""
    found = []
    for place, side in zip((3, 4), case["side_files"], strict=True):
        tensors = {
            row[0]: (row[1], tuple(row[2]), np.frombuffer(unpacked(row[place]), np.uint8).copy())
            for row in case["tensors"]
        }
        found.append(source(tensors, {path: bytes.fromhex(data) for path, data in side.items()}))
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_plain_decoder_reads_the_vectors(case: dict[str, Any]) -> None:
    base, target = sources(case)
    decoded: dict[int, bytes] = {}
    for raw in case["parts"]:
        decoded |= Part(bytes.fromhex(raw)).apply(tensor_bytes(base))
    assert decoded == {index: data for index, (_, data) in enumerate(tensor_bytes(target))}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_product_reads_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    base, target = sources(case)
    parts = []
    for number, raw in enumerate(case["parts"]):
        parts.append(tmp_path / f"part{number}")
        parts[-1].write_bytes(bytes.fromhex(raw))
    assert measure(base).digest == case["from"]
    assert measure(target).digest == case["to"]
    with Checkpoint.open(written(tmp_path, "base", base)) as opened:
        assert apply_patch(opened, parts, tmp_path / "out") == case["to"]
    with Checkpoint.open(tmp_path / "out") as opened:
        assert measure(opened).digest == case["to"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_writer_still_writes_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    """Same states and same zstd, same bytes; with another zstd the vectors say so and only decoding is compared."""
    base, target = sources(case)
    for number, raw in enumerate(case["parts"]):
        (tmp_path / "old").write_bytes(bytes.fromhex(raw))
        with PatchFile.open(tmp_path / "old") as old:
            indices = tuple(old.table.index.tolist())
            spec = PartSpec(number, len(case["parts"]), indices) if len(case["parts"]) > 1 else None
            rebuilt = build_patch(base, target, tmp_path / "new", part=spec).path.read_bytes()
            if old.metadata.zstd == ZSTD_VERSION:
                assert rebuilt == bytes.fromhex(raw)
        assert Part(rebuilt).apply(tensor_bytes(base)) == Part(bytes.fromhex(raw)).apply(tensor_bytes(base))


def test_the_vectors_use_every_encoding() -> None:
    used = {number for case in CASES for raw in case["parts"] for number in Part(bytes.fromhex(raw)).encoding}
    assert used == {0, 1, 2, 3, 4}
