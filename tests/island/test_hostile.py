"""A56: whoever makes merged patches (a worker, the store, the control plane) can find other bytes with equal sums. An
island takes what the publisher did not make by strong digests alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.errors import DigestMismatch
from mailboat.identity import new_key, public_half
from mailboat.image import Image
from mailboat.patch import build_patch
from mailboat.route import prove
from mailboat.signing import read_key, write_key
from tests.digest.collisions import collide
from tests.island.contract_server import ContractServer
from tests.island.fleet import CONFIG, Trainer, held_state, island
from tests.patch.test_hostile import put_together, taken_apart

ROWS = 160


def source(bits: np.ndarray) -> ArraySource:
    """A checkpoint of one tensor with one word per row."""
    return ArraySource({"w": bits}, dtypes={"w": "BF16"}, side_files={"config.json": CONFIG})


@pytest.mark.parametrize("signed", [True, False])
def test_a56_a_merged_patch_with_equal_sums_and_other_bytes_is_refused(
    server: ContractServer, tmp_path: Path, signed: bool
) -> None:
    path = tmp_path / "trainer.pem"
    write_key(path)
    options: dict[str, Any] = {"publisher_keys": (public_half(read_key(path)),)} if signed else {}
    server.head_keys = [new_key()]
    with Trainer(server, tmp_path, signing_key=path if signed else None) as trainer:
        trainer.weights = {"w": trainer.random.integers(0, 1 << 16, (ROWS, 4), np.uint16)}
        trainer.source = lambda: source(trainer.weights["w"])  # type: ignore[method-assign]
        trainer.step()
        before = source(trainer.weights["w"].copy())
        with island(server, tmp_path / "store", **options):
            server.wait_for(lambda: server.applied(0))
        trainer.step()
        trainer.step()
        after, target = source(trainer.weights["w"]), trainer.state()
    words = np.ascontiguousarray(trainer.weights["w"]).view(np.uint64).reshape(-1)
    evil = source(collide(words, "w", "BF16").view(np.uint16).reshape(ROWS, 4))
    other = measure(evil)
    assert np.array_equal(other.sums, target.sums) and other.digest != target.digest

    built = build_patch(before, evil, tmp_path / "evil.mbp")
    metadata, entries = taken_apart(built.path.read_bytes())
    raw = put_together(metadata | {"to": target.digest}, entries)
    built.path.write_bytes(raw)
    with Image.create(tmp_path / "image", before, measure(before)) as image:
        overlay = image.prepare((built.path,), target)  # the sums see nothing
        with pytest.raises(DigestMismatch, match="other bytes"):
            prove(image, overlay, target)
        overlay.close()

    honest = server.plan

    def lie(origin: int | None, to: int) -> dict[str, Any]:
        if origin != 0:
            return honest(origin, to)
        part = {"sha256": server.put(raw), "size": len(raw)}
        manifest = server.versions[to].manifest.sha256
        step = {"kind": "patch", "from": 0, "to": to, "manifest": manifest, "parts": [part]}
        return {"from": 0, "to": to, "bytes": len(raw), "steps": [step]}

    server.plan = lie  # type: ignore[method-assign]
    server.beats.clear()
    with island(server, tmp_path / "store", **options):
        server.wait_for(lambda: any("other bytes" in beat.get("alarm", "") for beat in server.beats))
        assert held_state(tmp_path / "store") == measure(before).digest and not server.applied(2)
        server.plan = honest  # type: ignore[method-assign]
        server.wait_for(lambda: server.applied(2))
    assert held_state(tmp_path / "store") == measure(after).digest
