"""The database itself refuses to change what was published, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import F, Model

from controlplane.registry import heads
from controlplane.registry.models import (
    Anchor,
    Blob,
    Channel,
    Epoch,
    Inventory,
    Patch,
    PatchPart,
    Run,
    Upload,
    Version,
)
from controlplane.registry.retention import removing
from tests.controlplane.making import commit, series

pytestmark = pytest.mark.django_db

HEX = "ab" * 32


@pytest.fixture
def published(run: Run) -> Run:
    series(run, 2)
    return run


def refused(model: type[Model], **changes: Any) -> None:
    row = model._default_manager.order_by("-pk")[0]
    with pytest.raises(DatabaseError, match=r"immutable|retention"), transaction.atomic():
        if changes:
            model._default_manager.filter(pk=row.pk).update(**changes)
        else:
            model._default_manager.filter(pk=row.pk)._raw_delete("default")


CONTENT = {
    "number": 99, "state_digest": HEX, "manifest_sha256": HEX, "digests_sha256": HEX, "envelope": {"payload": ""},
    "step": 7, "changed": 5, "elements": 5, "full_bytes": 5, "patch_bytes": 5, "side_files": [{"path": "x"}],
    "checkpoint_path": "/x", "published_by": "somebody", "inventory": None, "parent": None,
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(CONTENT))
def test_the_content_of_a_version_never_changes(published: Run, field: str) -> None:
    refused(Version, **{field: CONTENT[field]})


def test_what_the_validation_counted_is_written_once(published: Run) -> None:
    assert Version.objects.filter(unit_steps=None).update(unit_steps=3)
    refused(Version, unit_steps=4)
    refused(Version, unit_steps=None)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (Blob, {"size": 1}),
        (Blob, {"sha256": HEX}),
        (Inventory, {"tensors": 1}),
        (Epoch, {"number": 9}),
        (Epoch, {"reason": "another"}),
        (Patch, {"bytes": 1}),
        (Patch, {"kind": "other"}),
        (PatchPart, {"index": 4}),
        (Anchor, {"files": []}),
        (Anchor, {"bytes": 1}),
    ],
)
def test_published_rows_never_change(published: Run, model: type[Model], changes: dict[str, Any]) -> None:
    refused(model, **changes)


@pytest.mark.parametrize("model", [Version, Blob, Inventory, Epoch, Patch, PatchPart, Anchor])
def test_published_rows_are_removed_by_retention_alone(published: Run, model: type[Model]) -> None:
    refused(model)


def test_retention_removes_and_still_changes_nothing(published: Run) -> None:
    with removing():
        PatchPart.objects.all().delete()
        Patch.objects.all().delete()
        with pytest.raises(DatabaseError, match="immutable"), transaction.atomic():
            Blob.objects.update(size=F("size") + 1)
    refused(Anchor)
    with pytest.raises(RuntimeError), removing():
        raise RuntimeError
    refused(Anchor)


def test_writing_the_same_again_is_harmless(published: Run) -> None:
    row = Version.objects.order_by("-number")[0]
    row.save()
    Blob.objects.update(size=F("size"))
    assert Version.objects.get(pk=row.pk).state_digest == row.state_digest


@pytest.mark.parametrize(("state", "changed"), [("ready", "validating"), ("failed", "ready"), ("retired", "ready")])
def test_states_do_not_go_back(published: Run, state: str, changed: str) -> None:
    row = commit(published, 2, Version.objects.get(run=published, number=1))
    Version.objects.filter(pk=row.pk).update(state=state)
    refused(Version, state=changed)


def test_a_built_version_gets_its_content_once(run: Run) -> None:
    row = Version.objects.create(run=run, epoch=run.epochs.get(), number=0, checkpoint_path="/x", published_by="x")
    Version.objects.filter(pk=row.pk).update(manifest_sha256=HEX, state_digest=HEX, elements=5)
    refused(Version, elements=6)


def test_a_head_never_goes_back(published: Run) -> None:
    channel = Channel.objects.get(run=published, name="latest")
    older = Version.objects.get(run=published, number=0)
    for changes in ({"serial": channel.serial - 1}, {"generation": 0}, {"version": older}):
        with pytest.raises(DatabaseError, match="go back"), transaction.atomic():
            Channel.objects.filter(pk=channel.pk).update(**changes)
    Channel.objects.filter(pk=channel.pk).update(generation=channel.generation + 1, serial=1)
    with transaction.atomic():
        heads.move(Channel.objects.get(pk=channel.pk), older)
    assert Channel.objects.get(pk=channel.pk).version == older


@pytest.mark.parametrize("digest", ["", "x" * 64, "A" * 64, "a" * 63])
def test_digests_are_hex_in_every_table(run: Run, digest: str) -> None:
    rows = [
        Blob(run=run, sha256=digest, size=1),
        Upload(run=run, sha256=digest, size=1),
        Inventory(run=run, sha256=digest, tensors=1, elements=1, full_bytes=1),
    ]
    if digest:
        rows.append(
            Version(run=run, epoch=run.epochs.get(), number=0, published_by="x", state_digest=digest)  # type: ignore
        )
    for row in rows:
        with pytest.raises(IntegrityError), transaction.atomic():
            row.save()


def test_one_step_patch_leads_to_a_version(published: Run) -> None:
    patch = Patch.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic():
        Patch.objects.create(
            run=published, from_version=patch.to_version, to_version=patch.to_version, kind="step", bytes=1
        )
