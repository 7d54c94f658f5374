"""Build, validate and replay on real checkpoints and real blobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.db import connection

from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.image import Image
from tests.factories import mk_island
from tests.forgery import second_preimage
from tests.workers.checkpoints import commit, first, following, publish, source, work_on, write

pytestmark = pytest.mark.usefixtures("unsent")


@pytest.fixture
def allowed(tmp_path: Path, settings: Any) -> Path:
    folder = tmp_path / "allowed"
    folder.mkdir()
    settings.MAILBOAT_CHECKPOINT_ROOTS = (folder,)
    return folder


def job_of(version: Any) -> Any:
    version.job.refresh_from_db()
    return version.job


def copy_of(run: Any, home: Path) -> Image:
    return Image.open(home / "copies" / str(run.pk) / "image")


def replay(run: Any, number: int) -> Any:
    from controlplane.jobs import services
    from workers import runner

    job, _ = services.enqueue("replay", run, {"version": number}, f"replay:{number}")
    runner.run(str(job.pk))
    job.refresh_from_db()
    return job


def test_a_checkpoint_becomes_an_anchor_and_the_next_one_a_patch(run: Any, home: Path, allowed: Path) -> None:
    arrays = first()
    zero = work_on(commit(run, write(arrays, allowed / "0"), 0))
    assert (zero.state, zero.state_digest) == ("ready", measure(source(arrays)).digest), job_of(zero).error
    assert {file["path"] for file in zero.anchor.files} == {"config.json", "model.safetensors"}
    after = following(arrays, 2)
    one = work_on(commit(run, write(after, allowed / "1"), 1, 0))
    assert (one.state, one.state_digest) == ("ready", measure(source(after)).digest), job_of(one).error
    assert one.changed == arrays["model.weight"].size // 100
    assert one.patch_bytes < zero.full_bytes / 10
    image = copy_of(run, home)
    assert image.digest == one.state_digest
    image.close()
    run.refresh_from_db()
    assert run.channels.get(name="latest").version_id == one.pk
    messages = " ".join(job_of(one).events.values_list("message", flat=True))
    assert "elements changed" in messages


def test_a_run_that_encodes_for_the_link_has_both_encodings_tried(run: Any, allowed: Path) -> None:
    from controlplane.registry.models import Patch, Run

    Run.objects.filter(pk=run.pk).update(encode_for=Run.EncodeFor.LINK)
    mk_island(run, link_bytes_per_second=10_000_000)
    arrays = first()
    arrays["model.weight"] = (arrays["model.weight"] & 0x83FF) | 0x3C00  # few exponents, as of real weights
    work_on(commit(run, write(arrays, allowed / "0"), 0))
    for number in (1, 2):
        arrays = following(arrays, number)
        work_on(commit(run, write(arrays, allowed / str(number)), number, number - 1))
    codecs = Patch.objects.order_by("to_version__number").values_list("codecs", flat=True)
    assert list(codecs) == ["contextual", "positional"]


def test_a_changed_side_file_travels(run: Any, home: Path, allowed: Path) -> None:
    arrays = first()
    work_on(commit(run, write(arrays, allowed / "0"), 0))
    one = work_on(commit(run, write(arrays, allowed / "1", note="two"), 1, 0))
    assert one.state == "ready", job_of(one).error
    assert (one.changed, one.state_digest) == (0, measure(source(arrays, "two")).digest)


def test_a_lone_file_is_a_checkpoint_too(run: Any, allowed: Path) -> None:
    from mailboat.checkpoint.source import ArraySource
    from mailboat.checkpoint.writing import write_checkpoint

    lone = ArraySource({"w": np.arange(100, dtype=np.uint16)}, dtypes={"w": "BF16"})
    write_checkpoint(lone, allowed / "w.safetensors")
    zero = work_on(commit(run, allowed / "w.safetensors", 0))
    assert (zero.state, zero.state_digest) == ("ready", measure(lone).digest), job_of(zero).error


def test_a_link_that_leads_outside_since_the_commit_is_refused(
    run: Any, allowed: Path, home: Path, tmp_path: Path
) -> None:
    inside = write(first(), allowed / "0")
    version = commit(run, inside, 0)
    outside = write(first(9), tmp_path / "secret")
    for file in inside.iterdir():
        file.unlink()
    inside.rmdir()
    inside.symlink_to(outside)
    work_on(version)
    assert version.state == "failed"
    assert "MAILBOAT_CHECKPOINT_ROOTS" in version.reason
    assert not (home / "copies" / str(run.pk)).exists()


def test_a22_a_checkpoint_that_changes_while_it_is_read_fails(
    run: Any, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers import build

    path = write(first(), allowed / "0")
    version = commit(run, path, 0)
    original = build.services.add_blob

    def meddle(run: Any, content: Any) -> Any:
        blob = original(run, content)
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        return blob

    monkeypatch.setattr(build.services, "add_blob", meddle)
    work_on(version)
    assert version.state == "failed"
    assert "changed" in version.reason


def test_a25_another_inventory_fails_with_the_names(run: Any, allowed: Path) -> None:
    arrays = first()
    work_on(commit(run, write(arrays, allowed / "0"), 0))
    other = {("renamed" if name == "model.norm" else name): array for name, array in arrays.items()}
    one = work_on(commit(run, write(other, allowed / "1"), 1, 0))
    assert one.state == "failed"
    assert "model.norm" in one.reason
    two = work_on(commit(run, write(following(arrays, 3), allowed / "2"), 2, 0))
    assert two.state == "ready", job_of(two).error


def test_a_published_version_is_proven_before_it_is_announced(run: Any, home: Path, tmp_path: Path) -> None:
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    assert zero.state == "ready", job_of(zero).error
    after = following(arrays, 2)
    one = work_on(publish(run, after, 1, (arrays, zero), tmp_path))
    assert one.state == "ready", job_of(one).error
    image = copy_of(run, home)
    assert image.measure().digest == measure(source(after)).digest
    image.close()


def test_a_patch_to_other_bytes_than_promised_fails_with_the_tensor(run: Any, home: Path, tmp_path: Path) -> None:
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    one = work_on(publish(run, following(arrays, 2), 1, (arrays, zero), tmp_path, claims=following(arrays, 3)))
    assert one.state == "failed"
    assert one.reason
    image = copy_of(run, home)
    assert image.digest == zero.state_digest
    image.close()
    two = work_on(publish(run, following(arrays, 4), 2, (arrays, zero), tmp_path))
    assert two.state == "ready", job_of(two).error


def test_a56_a_patch_to_equal_sums_and_other_bytes_fails_with_the_tensor(run: Any, home: Path, tmp_path: Path) -> None:
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    honest = following(arrays, 2)
    inventory = source(honest).inventory
    tensor = inventory.tensors[inventory.index("model.weight")]
    forged = np.frombuffer(second_preimage(tensor, honest["model.weight"].tobytes()), np.uint16).reshape(300, 64)
    other = honest | {"model.weight": forged.copy()}
    assert (measure(source(other)).sums == measure(source(honest)).sums).all()
    one = work_on(publish(run, other, 1, (arrays, zero), tmp_path, claims=honest, relabelled=True))
    assert one.state == "failed"
    assert "model.weight" in job_of(one).error
    assert copy_of(run, home).digest == zero.state_digest


def test_an_anchor_with_other_bytes_than_promised_fails_with_the_tensor(run: Any, tmp_path: Path) -> None:
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path, claims=following(arrays, 3)))
    assert zero.state == "failed"
    assert "model.weight" in zero.reason


def test_a30_a_manifest_that_counts_other_changes_than_its_patch_fails(run: Any, tmp_path: Path) -> None:
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    one = work_on(publish(run, following(arrays, 2), 1, (arrays, zero), tmp_path, more=1))
    assert one.state == "failed"
    assert "elements change" in one.reason


@pytest.mark.parametrize("stray", ["sub/model.safetensors", "sub/model.safetensors.index.json"])
def test_a21_an_anchor_with_files_beyond_its_checkpoint_fails(run: Any, tmp_path: Path, stray: str) -> None:
    zero = work_on(publish(run, first(), 0, None, tmp_path, stray=stray))
    assert zero.state == "failed"
    assert stray in zero.reason


def test_a_damaged_blob_fails_the_version(run: Any, tmp_path: Path) -> None:
    from controlplane.registry import blobs
    from controlplane.registry.models import PatchPart

    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    one = publish(run, following(arrays, 2), 1, (arrays, zero), tmp_path)
    path = blobs.store().path(run.pk, PatchPart.objects.get().blob.sha256)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    work_on(one)
    assert one.state == "failed"
    assert "damaged" in one.reason


@pytest.mark.parametrize("damage", ["dirty", "gone", "elsewhere"])
def test_the_copy_is_rebuilt_when_it_can_not_be_used(run: Any, home: Path, tmp_path: Path, damage: str) -> None:
    import shutil

    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    after = following(arrays, 2)
    one = work_on(publish(run, after, 1, (arrays, zero), tmp_path))
    folder = home / "copies" / str(run.pk) / "image"
    if damage == "dirty":
        (folder / ".mailboat-dirty").touch()
    elif damage == "gone":
        shutil.rmtree(folder)
    else:
        stranger = source(first(77))
        Image.create(folder, stranger, measure(stranger)).close()
    two = work_on(publish(run, following(after, 5), 2, (after, one), tmp_path))
    assert two.state == "ready", job_of(two).error
    image = copy_of(run, home)
    assert image.measure().digest == two.state_digest
    image.close()


def test_a_job_that_comes_again_after_the_version_became_ready_changes_nothing(run: Any, tmp_path: Path) -> None:
    from controlplane.jobs.models import Job

    zero = work_on(publish(run, first(), 0, None, tmp_path))
    Job.objects.filter(pk=zero.job_id).update(state="queued", finished_at=None)
    ready_at = zero.ready_at
    work_on(zero)
    assert (job_of(zero).state, zero.state, zero.ready_at) == ("succeeded", "ready", ready_at)


def test_replay_compares_every_version_from_the_anchor(run: Any, home: Path, tmp_path: Path) -> None:
    arrays, parent = first(), None
    for number in range(4):
        base = None if parent is None else (arrays, parent)
        arrays = arrays if parent is None else following(arrays, number)
        parent = work_on(publish(run, arrays, number, base, tmp_path))
    job = replay(run, 3)
    assert job.state == "succeeded", job.error
    assert job.result["identical"] is True
    assert [item["number"] for item in job.result["versions"]] == [0, 1, 2, 3]
    assert (job.done, job.total, job.unit) == (4, 4, "steps")
    assert not list((home / "scratch").iterdir())


def test_replay_names_the_version_and_the_tensor_that_differ(run: Any, tmp_path: Path) -> None:
    from controlplane.registry import blobs

    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    one = work_on(publish(run, following(arrays, 2), 1, (arrays, zero), tmp_path))
    # The record is forged so that it agrees with itself, but not with the patch.
    forged = measure(source(following(arrays, 3)))
    digests, _ = blobs.store().write(run.pk, forged.digests_bytes())
    from mailboat.manifest import BlobRef, Manifest

    manifest = Manifest.from_bytes(blobs.store().read(run.pk, one.manifest_sha256))
    fields = {name: getattr(manifest, name) for name in Manifest.__slots__}
    fields |= {"digests": BlobRef(digests, len(forged.digests_bytes())), "state": forged.digest}
    sha256, _ = blobs.store().write(run.pk, Manifest(**fields).to_bytes())
    with connection.cursor() as owner:  # only the database's owner can forge a record
        owner.execute("ALTER TABLE registry_version DISABLE TRIGGER version_content")
        type(one).objects.filter(pk=one.pk).update(manifest_sha256=sha256, state_digest=forged.digest)
        owner.execute("ALTER TABLE registry_version ENABLE TRIGGER version_content")
    job = replay(run, 1)
    assert job.state == "failed"
    assert "version 1" in job.error
    assert job.result["identical"] is False
    assert [item["identical"] for item in job.result["versions"]] == [True, False]


def test_the_blobs_of_a_built_version_are_a_checkpoint_for_anyone(run: Any, allowed: Path, tmp_path: Path) -> None:
    from controlplane.registry import blobs

    arrays = first()
    zero = work_on(commit(run, write(arrays, allowed / "0"), 0))
    folder = tmp_path / "fetched"
    folder.mkdir()
    for file in zero.anchor.files:
        (folder / file["path"]).write_bytes(blobs.store().read(run.pk, file["sha256"]))
    with Checkpoint.open(folder) as checkpoint:
        assert measure(checkpoint).digest == zero.state_digest


def test_a_patch_leaves_statistics_per_tensor(run: Any, tmp_path: Path) -> None:
    from controlplane.registry import blobs
    from mailboat.patch.statistics import Statistics

    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    assert zero.state == "ready" and zero.statistics is None, "an anchor changes nothing"
    one = work_on(publish(run, following(arrays, 2), 1, (arrays, zero), tmp_path))
    assert one.statistics is not None
    found = Statistics.from_bytes(blobs.store().read(run.pk, one.statistics.sha256))
    assert len(found.changed) == one.inventory.tensors
    assert found.changed.sum() == one.changed > 0
    assert 0 <= found.unit_steps.sum() == one.unit_steps <= one.changed
    assert 0 < found.sizes.sum() < one.patch_bytes
