"""Small real checkpoints and versions made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest, ParentRef, PatchRef
from tests.patch.test_hostile import put_together, taken_apart

Arrays = dict[str, np.ndarray]


def first(seed: int = 1, rows: int = 300) -> Arrays:
    """Random bits: a matrix, a vector and a float32 scalar."""
    random = np.random.default_rng(seed)
    return {
        "model.weight": random.integers(0, 1 << 16, (rows, 64), dtype=np.uint16),
        "model.norm": random.integers(0, 1 << 16, (64,), dtype=np.uint16),
        "scale": random.random(1, dtype=np.float32).reshape(()),
    }


def following(arrays: Arrays, seed: int) -> Arrays:
    """About one percent of the matrix moves by one unit in the last place."""
    random = np.random.default_rng(seed)
    changed = {name: array.copy() for name, array in arrays.items()}
    flat = changed["model.weight"].reshape(-1)
    flat[random.choice(flat.size, flat.size // 100, replace=False)] ^= 1
    return changed


def source(arrays: Arrays, note: str = "one") -> ArraySource:
    """The arrays as BF16, with a side file."""
    dtypes = {name: "BF16" for name, array in arrays.items() if array.dtype == np.uint16}
    return ArraySource(arrays, dtypes=dtypes, side_files={"config.json": f'{{"note":"{note}"}}'.encode()})


def write(arrays: Arrays, folder: Path, note: str = "one") -> Path:
    """The arrays as a checkpoint folder."""
    write_checkpoint(source(arrays, note), folder)
    return folder


def commit(run: Any, path: Path, number: int, parent: int | None = None) -> Any:
    """A version that a worker is to build from a checkpoint."""
    from controlplane.registry import services

    version, _ = services.commit_checkpoint(run, str(path), number, parent, 0, actor="test")
    return version


def publish(run: Any, arrays: Arrays, number: int, base: Any, scratch: Path, **lies: Any) -> Any:
    """A version as a publisher commits it: anchor files for the first one, a patch for the others.

    `base` is (arrays, version) of the parent. `lies` change what is told: `claims` other arrays' digests, `more`
    changed elements, a `stray` file in the anchor, a patch `relabelled` to lead to the claimed state.
    """
    from controlplane.registry import services

    target = source(arrays)
    state: State = measure(source(lies.get("claims", arrays)))
    anchor = patch = parent = None
    if base is None:
        folder = scratch / f"upload-{number}"
        write_checkpoint(target, folder)
        anchor = []
        for path in sorted(folder.iterdir()):
            blob = services.add_blob(run, path)
            anchor.append({"path": path.name, "sha256": blob.sha256, "size": blob.size})
        anchor += [anchor[-1] | {"path": lies["stray"]}] if "stray" in lies else []
    else:
        from mailboat.patch import build_patch

        built = build_patch(source(base[0]), target, scratch / f"step-{number}.mbp")
        if "relabelled" in lies:
            metadata, entries = taken_apart(built.path.read_bytes())
            built.path.write_bytes(put_together(metadata | {"to": state.digest}, entries))
        blob = services.add_blob(run, built.path)
        patch = PatchRef((BlobRef(blob.sha256, blob.size),), built.changed + lies.get("more", 0))
        parent = ParentRef(base[1].number, base[1].state_digest)
    inventory = services.add_blob(run, state.inventory.to_bytes())
    digests = services.add_blob(run, state.digests_bytes())
    manifest = Manifest(
        run=str(run.pk), epoch=0, number=number, parent=parent, state=state.digest, patch=patch,
        inventory=BlobRef(inventory.sha256, inventory.size), digests=BlobRef(digests.sha256, digests.size),
        side_files=state.side_files, elements=state.inventory.elements, full_bytes=state.inventory.full_bytes,
    )  # fmt: skip
    envelope = Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes()).to_dict()
    version, _ = services.commit_manifest(run, envelope, anchor, actor="test")
    return version


def work_on(version: Any) -> Any:
    """Runs the version's job here and now; returns the version as it is afterwards."""
    from workers import runner

    version.refresh_from_db()
    runner.run(str(version.job_id))
    version.refresh_from_db()
    return version
