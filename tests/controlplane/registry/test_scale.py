"""Half a million tensors and hundreds of files: rows, answers and memory stay small."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.registry import services
from controlplane.registry.models import Anchor, Blob, Inventory, PatchPart, Run, Version
from mailboat.canonical import encode
from mailboat.checkpoint.inventory import FORMAT
from mailboat.digest import state_digest_of_parts
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest
from tests.controlplane.conftest import Api
from tests.controlplane.making import make_ready

pytestmark = pytest.mark.django_db

TENSORS, SHARDS = 497_000, 300
MIB = 1 << 20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


@pytest.fixture
def huge(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A version of half a million tensors in hundreds of shards; its blobs are in the store."""
    names = (f"layers.{i // 512:03}.experts.{i % 512:03}.weight" for i in range(TENSORS))
    rows = [["target", name, "BF16", [8, 4], None] for name in names]
    inventory = encode({"aliases": {}, "format": FORMAT, "quantiser": None, "tensors": rows})
    del rows
    digests = bytes(48 * TENSORS)
    refs = {}
    for name, data in (("inventory", inventory), ("digests", digests)):
        refs[name] = BlobRef(services.add_blob(run, data).sha256, len(data))
    files = []
    for number in range(SHARDS):
        blob = services.add_blob(run, b"shard %d" % number)
        files.append({"path": f"model-{number:05}.safetensors", "sha256": blob.sha256, "size": blob.size})
    manifest = Manifest(
        run=str(run.pk), epoch=0, number=0, parent=None, side_files=(), patch=None, step=None,
        state=state_digest_of_parts(hashlib.sha256(inventory).hexdigest(), TENSORS, digests, ()),
        elements=TENSORS * 32, full_bytes=TENSORS * 64, **refs,
    )  # fmt: skip
    return Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes()).to_dict(), files


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not tell a process's peak")
def test_a59_half_a_million_tensors_stay_small(
    run: Run, huge: tuple[dict[str, Any], list[dict[str, Any]]], token: Callable[..., Api]
) -> None:
    envelope, files = huge
    api = token("publisher")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    answer = api.post("runs/minilm/versions", {"envelope": envelope, "anchor": files})
    assert answer.status_code == 202
    assert _status("VmHWM") - before < 160 * MIB, "the two documents once each, and little more"
    version = Version.objects.get()
    assert Inventory.objects.get().tensors == TENSORS
    assert (Version.objects.count(), Anchor.objects.count(), PatchPart.objects.count()) == (1, 1, 0)
    assert Blob.objects.count() == SHARDS + 3, "inventory, digests and manifest beside the shards"
    make_ready(version)
    for path, most in {
        "runs/minilm": 2_000,
        "runs/minilm/versions": 2_000,
        "runs/minilm/versions/0/manifest": 4_000,
        "runs/minilm/channels/latest/head": 2_000,
        "runs/minilm/versions/0": 200 * SHARDS,
        "runs/minilm/plan": 200 * SHARDS,
    }.items():
        assert len(api.get(path).content) < most, path
