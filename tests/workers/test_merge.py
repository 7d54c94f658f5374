"""Merged and reverse patches and anchors, built by a worker over real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane.jobs.models import Job
from controlplane.registry import blobs, merging, routes
from controlplane.registry.cost import Means
from controlplane.registry.models import Anchor, Patch, Run, Version
from mailboat.digest import measure
from mailboat.patch import apply_patch, build_patch
from tests.workers.checkpoints import Arrays, first, following, publish, source, work_on, write

pytestmark = pytest.mark.usefixtures("unsent")


def line(run: Run, scratch: Path, length: int) -> list[tuple[Arrays, Version]]:
    """Published and proven versions in a row."""
    found: list[tuple[Arrays, Version]] = []
    for number in range(length):
        arrays = following(found[-1][0], number) if found else first()
        version = work_on(publish(run, arrays, number, found[-1] if found else None, scratch))
        assert version.state == "ready", version.job.error
        found.append((arrays, version))
    return found


def carry_out(job: Job) -> Job:
    from workers import runner

    runner.run(str(job.pk))
    job.refresh_from_db()
    return job


def merge(run: Run, origin: int, to: int) -> Job:
    return carry_out(merging.enqueue(run, origin, to, why=merging.ASKED)[0])


def direct(before: Arrays, after: Arrays, scratch: Path) -> bytes:
    out = scratch / "direct.mbp"
    build_patch(source(before), source(after), out)
    return out.read_bytes()


def content(patch: Patch) -> bytes:
    (part,) = patch.parts.all()
    return blobs.store().read(patch.run_id, part.blob.sha256)


def test_a_merged_patch_is_byte_for_byte_the_direct_one(run: Run, tmp_path: Path) -> None:
    states = line(run, tmp_path, 5)
    for origin, to in ((0, 4), (1, 3), (2, 4), (4, 1)):
        job = merge(run, origin, to)
        assert (job.state, job.result and job.result["kept"]) == ("succeeded", True), job.error
        patch = Patch.objects.get(from_version=states[origin][1], to_version=states[to][1])
        assert content(patch) == direct(states[origin][0], states[to][0], tmp_path)
        assert patch.kind == ("merged" if to > origin else "reverse")
        assert (patch.bytes, patch.codecs) == (len(content(patch)), "positional") or patch.codecs
        assert job.result and job.result["bytes"] < job.result["replaces"]


def test_a_side_file_on_the_way_comes_along(run: Run, tmp_path: Path, settings: Any) -> None:
    from tests.workers.checkpoints import commit

    settings.MAILBOAT_CHECKPOINT_ROOTS = (tmp_path,)
    arrays = first()
    for number, note in enumerate(("one", "two", "three")):
        folder = write(arrays, tmp_path / str(number), note=note)
        assert work_on(commit(run, folder, number, number - 1 if number else None)).state == "ready"
    assert merge(run, 0, 2).state == merge(run, 2, 0).state == "succeeded"
    from mailboat.checkpoint.files import Checkpoint

    for origin, to in ((0, 2), (2, 0)):
        found = routes.find(run, Version.objects.get(run=run, number=origin).state_digest, to, means=Means.of(link=1))
        assert len(found.steps) == 1
        part = blobs.store().local(run.pk, found.steps[0]["parts"][0]["sha256"], tmp_path)
        with Checkpoint.open(tmp_path / str(origin)) as base:
            out = tmp_path / f"applied-{origin}"
            apply_patch(base, [part], out)
        with Checkpoint.open(out) as made:
            assert measure(made).digest == Version.objects.get(run=run, number=to).state_digest


def test_a_span_is_merged_when_its_last_version_gets_ready(run: Run, tmp_path: Path) -> None:
    line(run, tmp_path, 9)
    queued = Job.objects.filter(run=run, kind="merge").order_by("queued_at")
    spans = [(job.params["from"], job.params["to"]) for job in queued]
    assert spans == [(0, 2), (0, 4), (2, 4), (4, 6), (0, 8), (4, 8), (6, 8)]
    for job in queued:
        assert carry_out(job).state == "succeeded", job.error
    digest = Version.objects.get(run=run, number=1).state_digest
    found = routes.find(run, digest, 8, means=Means.of(link=1000))
    assert [(step["from"], step["to"]) for step in found.steps] == [(1, 2), (2, 4), (4, 8)]
    assert [step["via"] for step in found.steps] == ["step", "merged", "merged"]


def test_a_run_may_want_no_merges(run: Run, tmp_path: Path) -> None:
    Run.objects.filter(pk=run.pk).update(merge_up_to=2)
    line(run, tmp_path, 5)
    assert [job.params["from"] for job in Job.objects.filter(kind="merge").order_by("queued_at")] == [0, 2]


def test_a_patch_that_saves_nothing_is_not_kept_nor_tried_again(run: Run, tmp_path: Path) -> None:
    """Every version changes other elements, and all of them: the merged one is as large as the two."""
    arrays = first()
    base: Any = None
    for number in range(3):
        changed = {name: array.copy() for name, array in arrays.items()}
        if number:
            changed["model.weight"][100 * number : 100 * number + 40] ^= 0x5A5A
            changed["model.weight"] = (
                changed["model.weight"]
                if base is None
                else np.where(
                    np.arange(300)[:, None] // 100 == number, changed["model.weight"], base[0]["model.weight"]
                )
            )
        version = work_on(publish(run, changed, number, base, tmp_path))
        base = changed, version
    job = merge(run, 0, 2)
    assert job.state == "succeeded" and job.result
    assert job.result["kept"] is (job.result["bytes"] < job.result["replaces"])


def test_a49_a_killed_worker_leaves_one_merged_patch(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A49: the lease runs out between the bytes and their row; the next attempt makes the same bytes and one row."""
    from controlplane.jobs import services as jobs
    from workers import runner
    from workers.lease import LeaseLost

    states = line(run, tmp_path, 4)
    job = merging.enqueue(run, 0, 3, why=merging.ASKED)[0]

    def die(*_: Any, **__: Any) -> None:
        raise LeaseLost

    with monkeypatch.context() as patched:
        patched.setattr(merging, "record", die)
        runner.run(str(job.pk))
    job.refresh_from_db()
    assert job.state == "running" and not Patch.objects.filter(kind="merged").exists()
    Job.objects.filter(pk=job.pk).update(lease_expires_at="2020-01-01T00:00:00Z")
    jobs.requeue_expired()
    assert carry_out(job).state == "succeeded" and job.attempt == 2
    assert content(Patch.objects.get(kind="merged")) == direct(states[0][0], states[3][0], tmp_path)
    assert merge(run, 0, 3).state == "succeeded" and Patch.objects.filter(kind="merged").count() == 1


def test_what_an_island_waits_for_goes_first(run: Run, tmp_path: Path) -> None:
    line(run, tmp_path, 5)
    policy = Job.objects.filter(kind="merge").order_by("queued_at").first()
    assert policy is not None
    asked, _ = merging.enqueue(run, 1, 4, why=merging.ASKED)
    assert carry_out(policy).state == "queued" and policy.waiting_for == "a merge that an island waits for"
    assert carry_out(asked).state == "succeeded"
    Job.objects.filter(pk=policy.pk).update(not_before=None)
    assert carry_out(policy).state == "succeeded"


def test_an_anchor_is_built_by_policy_and_proven(run: Run, home: Path, tmp_path: Path) -> None:
    Run.objects.filter(pk=run.pk).update(anchor_every=2, merge_up_to=0)
    states = line(run, tmp_path, 4)
    (job,) = Job.objects.filter(kind="anchor")
    assert carry_out(job).state == "succeeded", job.error
    assert (job.done, job.total, job.unit) == (2, 2, "files")
    anchor = Anchor.objects.get(version=states[2][1])
    assert anchor.kind == "built" and {file["path"] for file in anchor.files} == {"config.json", "model.safetensors"}
    found = routes.find(run, "", 3)
    assert [step.get("version", step.get("to")) for step in found.steps] == [2, 3]
    from controlplane.jobs import services as jobs

    replayed = carry_out(jobs.enqueue("replay", run, {"version": 3}, "replay")[0])
    assert replayed.result and [v["number"] for v in replayed.result["versions"]] == [2, 3]
    assert replayed.result["identical"]


def test_a_worker_that_begins_anew_makes_the_same_patch(run: Run, home: Path, tmp_path: Path) -> None:
    from workers import history

    states = line(run, tmp_path, 6)
    assert merge(run, 2, 4).state == "succeeded"
    for kept in history._kept.values():
        for overlay in kept:
            overlay.close()
    history._kept.clear()  # what a new process knows
    assert merge(run, 1, 5).state == "succeeded"
    patch = Patch.objects.get(from_version=states[1][1], to_version=states[5][1])
    assert content(patch) == direct(states[1][0], states[5][0], tmp_path)


def test_a_damaged_copy_is_never_published_from(run: Run, home: Path, tmp_path: Path) -> None:
    states = line(run, tmp_path, 4)
    assert merge(run, 0, 2).state == "succeeded"
    weights = home / "copies" / str(run.pk) / "history" / "image" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    job = merge(run, 0, 3)
    assert job.state == "succeeded", job.error
    assert "damaged" in " ".join(job.events.values_list("message", flat=True))
    assert content(Patch.objects.get(to_version=states[3][1], kind="merged")) == direct(
        states[0][0], states[3][0], tmp_path
    )
