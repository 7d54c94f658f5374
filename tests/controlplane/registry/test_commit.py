"""Commits: compare-and-set on number and parent, all or nothing, harmless when repeated."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection

from controlplane.jobs.models import Job
from controlplane.registry import blobs, routes, services
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Anchor, Blob, Patch, Run, Version
from tests.controlplane.making import Built, build, commit, inventory_of, make_ready, ready, series, upload
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db


def send(run: Run, built: Built) -> tuple[Version, bool]:
    return services.commit_manifest(run, built.envelope, built.anchor, actor="publisher:trainer")


def refused(run: Run, built: Built, code: str) -> Refusal:
    before = snapshot(run)
    with pytest.raises(Refusal) as caught:
        send(run, built)
    assert caught.value.code == code
    assert snapshot(run) == before, "a refused commit changes nothing"
    return caught.value


def snapshot(run: Run) -> Any:
    return (
        list(Version.objects.filter(run=run).order_by("number").values_list("number", "state", "manifest_sha256")),
        Job.objects.count(),
        Patch.objects.count(),
        Anchor.objects.count(),
    )


def test_first_version_is_number_0_with_an_anchor(run: Run) -> None:
    version = commit(run, 0)
    assert (version.number, version.state, version.parent) == (0, "committed", None)
    assert version.anchor.files[0]["path"] == "model.safetensors"
    assert version.job is not None and version.job.kind == "validate"


def test_first_version_may_not_be_1(run: Run) -> None:
    built = build(run, 1)
    upload(run, built)
    assert refused(run, built, "version_conflict").extra["next"] == 0


def test_a03_repeated_commit_is_the_same_version(run: Run) -> None:
    built = build(run, 0)
    upload(run, built)
    first, new = send(run, built)
    again, second = send(run, built)
    assert (new, second) == (True, False)
    assert first == again
    assert Version.objects.filter(run=run).count() == Job.objects.count() == 1


def test_a03_other_content_under_a_taken_number_is_refused(run: Run) -> None:
    commit(run, 0)
    other = build(run, 0, salt="other")
    upload(run, other)
    assert refused(run, other, "version_conflict").extra["next"] == 1


def test_a03_a_gap_is_refused(run: Run) -> None:
    first = ready(run, 0)
    built = build(run, 2, first)
    upload(run, built)
    refused(run, built, "version_conflict")


def test_a03_repeating_a_failed_version_says_that_it_failed(run: Run) -> None:
    built = build(run, 0)
    upload(run, built)
    version, _ = send(run, built)
    services.mark_failed(version, "It is wrong.")
    again, new = send(run, built)
    assert (again.state, new) == ("failed", False)


@pytest.mark.django_db(transaction=True)
def test_a19_two_publishers_race_and_one_wins(run: Run) -> None:
    parent = ready(run, 0)
    rivals = [build(run, 1, parent, salt=name) for name in ("left", "right")]
    for rival in rivals:
        upload(run, rival)
    barrier, outcomes = threading.Barrier(2), []

    def publish(built: Built) -> None:
        try:
            barrier.wait(PATIENCE)
            outcomes.append(send(run, built)[0].state_digest)
        except Refusal as error:
            outcomes.append(error.code)
        finally:
            connection.close()

    threads = [threading.Thread(target=publish, args=(rival,)) for rival in rivals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert outcomes.count("version_conflict") == 1
    winner = Version.objects.get(run=run, number=1)
    assert winner.state_digest in outcomes
    assert [patch.changed for patch in Patch.objects.filter(to_version=winner)] == [winner.changed]
    assert winner.changed


@pytest.mark.parametrize("name", ["inventory", "digests", "part 0", "model.safetensors"])
def test_a20_a21_missing_parts_are_named(run: Run, name: str) -> None:
    parent = ready(run, 0)
    built = build(run, 1, parent, anchored=True)
    # The inventory is the parent's too, so a digest that nobody uploaded stands for it.
    if name == "inventory":
        other = inventory_of((("model.other.weight", "BF16", (8, 4)),))
        built = build(run, 1, parent, anchored=True, inventory=other)
    upload(run, built, leave_out=frozenset({name}))
    error = refused(run, built, "missing_parts")
    assert [item["name"] for item in error.extra["missing"]] == [name]
    assert name in error.detail


def test_a21_a_blob_that_lost_its_file_or_size_is_missing(run: Run) -> None:
    built = build(run, 0)
    upload(run, built)
    digest = built.manifest.digests.sha256
    blobs.store().path(run.pk, digest).write_bytes(b"short")
    assert refused(run, built, "missing_parts").extra["missing"][0]["name"] == "digests"
    blobs.store().path(run.pk, digest).unlink()
    refused(run, built, "missing_parts")
    upload(run, built)
    assert send(run, built)[1]


def test_a18_blobs_of_another_run_do_not_count(run: Run, other_run: Run) -> None:
    built = build(run, 0)
    upload(other_run, built)
    refused(run, built, "missing_parts")


def test_a25_inventory_of_the_epoch_is_compared_by_name(run: Run) -> None:
    parent = ready(run, 0)
    changed = inventory_of((("model.embed.weight", "F16", (8, 4)), ("model.extra.bias", "F32", (4,))))
    built = build(run, 1, parent, inventory=changed)
    upload(run, built)
    error = refused(run, built, "inventory_mismatch")
    assert set(error.extra["tensors"]) == {"model.embed.weight", "model.extra.bias", "model.norm.weight"}
    for name in error.extra["tensors"]:
        assert name in error.detail


def test_a_new_epoch_may_have_another_inventory_with_an_anchor(run: Run) -> None:
    base = ready(run, 0)
    services.begin_epoch(run, 0, "The quantiser changed.", actor="test")
    inventory = inventory_of((("model.embed.weight", "F8_E4M3", (8, 4)),))
    built = build(run, 1, epoch=1, inventory=inventory)
    upload(run, built)
    assert send(run, built)[1]
    patched = build(run, 2, base, epoch=1, inventory=inventory)
    upload(run, patched)
    refused(run, patched, "wrong_parent")


def test_a13_numbers_go_on_in_a_new_epoch_and_old_ones_are_refused(run: Run) -> None:
    versions = series(run, 3)
    services.begin_epoch(run, 1, "Resumed from step 10.", actor="test")
    for number, epoch, code in [(0, 1, "version_conflict"), (3, 0, "wrong_epoch")]:
        built = build(run, number, None if number == 0 else versions[2], epoch=epoch, salt="resumed")
        upload(run, built)
        refused(run, built, code)
    assert commit(run, 3, versions[1], epoch=1).epoch.number == 1


def test_wrong_parent_is_refused(run: Run) -> None:
    versions = series(run, 2)
    built = build(run, 2, versions[0])
    upload(run, built)
    assert refused(run, built, "wrong_parent").extra["parent"] == 1


def test_parent_of_another_state_is_refused(run: Run) -> None:
    versions = series(run, 2)
    versions[1].state_digest = "f" * 64
    built = build(run, 2, versions[1])
    upload(run, built)
    refused(run, built, "wrong_parent")


def test_after_a_failed_version_the_last_ready_one_is_the_parent(run: Run) -> None:
    first = ready(run, 0)
    failed = commit(run, 1, first)
    services.mark_failed(failed, "Bad part.")
    on_failed = build(run, 2, failed)
    upload(run, on_failed)
    refused(run, on_failed, "parent_not_ready")
    second = ready(run, 2, first)
    assert (second.state, second.parent) == ("ready", first)


def test_unknown_parent_is_refused(run: Run) -> None:
    first = ready(run, 0)
    first.number = 0
    built = build(run, 8, first)
    upload(run, built)
    refused(run, built, "version_conflict")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "00000000-0000-0000-0000-000000000000"},
        {"state": "0" * 64},
        {"elements": 1},
        {"full_bytes": 1},
        {"step": 1 << 63},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(run: Run, changes: dict[str, Any]) -> None:
    built = build(run, 0, **changes)
    upload(run, built)
    refused(run, built, "manifest_invalid")


def test_neither_patch_nor_anchor_is_refused(run: Run) -> None:
    built = build(run, 0)
    upload(run, built)
    with pytest.raises(Refusal, match="neither a patch nor an anchor"):
        services.commit_manifest(run, built.envelope, None, actor="test")


@pytest.mark.parametrize(
    "path", ["../model.safetensors", "/model.safetensors", ".model.safetensors", "a//b.safetensors", "x"]
)
def test_anchors_stay_in_their_folder(run: Run, path: str) -> None:
    built = build(run, 0)
    upload(run, built)
    assert built.anchor
    with pytest.raises(Refusal) as caught:
        services.commit_manifest(run, built.envelope, [built.anchor[0] | {"path": path}], actor="test")
    assert caught.value.code == "anchor_invalid"


def test_the_manifest_becomes_a_blob(run: Run) -> None:
    version = commit(run, 0)
    assert Blob.objects.filter(run=run, sha256=version.manifest_sha256).exists()
    assert blobs.store().read(run.pk, version.manifest_sha256)


def test_an_empty_patch_is_a_version_of_its_own(run: Run) -> None:
    """A02: an empty patch is an explicit version with equal digest."""
    first = ready(run, 0)
    same = build(run, 0)
    blobs_of_first = {"digests": same.blobs["digests"]}
    built = build(run, 1, first, digests=same.manifest.digests, state=first.state_digest)
    built.blobs.update(blobs_of_first)
    upload(run, built)
    version = make_ready(send(run, built)[0])
    assert (version.number, version.state_digest) == (1, first.state_digest)


def test_a_rewind_past_the_nearest_anchor_has_a_route(run: Run) -> None:
    first = ready(run, 0)
    second = ready(run, 1, first)
    ready(run, 2, second, anchored=True)
    services.begin_epoch(run, 1, "Resumed from step 10.", actor="test")
    rewound = ready(run, 3, second, epoch=1)
    steps = routes.find(run, "", 3).steps
    assert [step.get("version", step.get("to")) for step in steps] == [0, 1, 3]
    assert len(routes.find(run, second.state_digest, rewound.number).steps) == 1


# Epochs


def test_a13_an_epoch_goes_on_from_the_state_that_the_trainer_names(run: Run) -> None:
    versions = series(run, 3)
    epoch = services.begin_epoch(run, None, "Resumed.", from_state=versions[1].state_digest, actor="test")
    assert epoch.from_version == versions[1]
    wrong = build(run, 3, versions[2], epoch=1)
    upload(run, wrong)
    refused(run, wrong, "wrong_parent")
    assert commit(run, 3, versions[1], epoch=1).parent == versions[1]


def test_an_epoch_from_a_state_that_no_version_has(run: Run) -> None:
    versions = series(run, 3)
    epoch = services.begin_epoch(run, None, "Resumed elsewhere.", from_state="ab" * 32, actor="test")
    assert (epoch.from_version, epoch.from_state) == (None, "ab" * 32)
    # Its first patch may start from any ready version: whatever makes it small.
    first = ready(run, 3, versions[0], epoch=1)
    wrong = build(run, 4, versions[2], epoch=1)
    upload(run, wrong)
    refused(run, wrong, "wrong_parent")
    assert commit(run, 4, first, epoch=1).parent == first


def test_number_and_state_of_an_epoch_must_agree(run: Run) -> None:
    series(run, 2)
    with pytest.raises(Refusal, match="another state digest"):
        services.begin_epoch(run, 1, "Resumed.", from_state="ab" * 32, actor="test")
    assert run.epochs.count() == 1
