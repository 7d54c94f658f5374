"""The life of a version: order of readiness, failure, the channel and its head."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from controlplane.audit.models import Entry
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import beside, blobs, heads, services
from controlplane.registry.errors import WrongState
from controlplane.registry.models import Channel, Run, Version
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from tests.controlplane.making import commit, make_ready, ready, series

pytestmark = pytest.mark.django_db


def head_of(run: Run) -> Head:
    channel = Channel.objects.get(run=run, name="latest")
    return Head.from_bytes(Envelope.from_dict(channel.head_envelope).open(HEAD_TYPE))


def test_ready_moves_latest_and_writes_its_head(run: Run) -> None:
    version = ready(run, 0)
    head = head_of(run)
    assert (head.version, head.state, head.serial, head.generation) == (0, version.state_digest, 1, 1)
    assert head.expires - head.issued == 7 * 86400
    assert head.manifest == version.manifest_sha256
    ready(run, 1, version)
    assert (head_of(run).version, head_of(run).serial) == (1, 2)


@pytest.mark.django_db(transaction=True)
def test_head_lies_beside_the_blobs_once_it_is_committed(run: Run) -> None:
    ready(run, 0)
    channel = Channel.objects.get(run=run, name="latest")
    assert blobs.store().document_path(beside.head_name(run.pk, "latest")).read_bytes() == heads.encoded(
        channel.head_envelope
    )


def test_a20_head_is_not_written_when_the_move_is_rolled_back(run: Run) -> None:
    version = commit(run, 0)
    services.begin_validating(version)
    with pytest.raises(RuntimeError), transaction.atomic():
        services.mark_ready(version)
        raise RuntimeError
    assert not blobs.store().document_path(beside.head_name(run.pk, "latest")).exists()
    assert Channel.objects.get(run=run).version is None


def test_renewal_keeps_the_serial(run: Run) -> None:
    ready(run, 0)
    assert services.renew_heads() == 0
    Channel.objects.filter(run=run).update(expires_at=Now() + timedelta(days=1))
    assert services.renew_heads() == 1
    channel = Channel.objects.get(run=run)
    assert (channel.serial, head_of(run).serial) == (1, 1)
    assert channel.expires_at is not None and channel.expires_at.timestamp() == pytest.approx(
        head_of(run).expires, abs=1
    )


def test_renewal_puts_a_lost_file_back(run: Run) -> None:
    ready(run, 0)
    services.renew_heads()
    assert blobs.store().document_path(beside.head_name(run.pk, "latest")).exists()


def test_n_plus_1_is_never_ready_before_n(run: Run) -> None:
    first = ready(run, 0)
    second = commit(run, 1, first)
    third = commit(run, 2, second)
    services.begin_validating(third)
    with pytest.raises(WrongState, match="before version 1"):
        services.mark_ready(third)
    make_ready(second)
    services.mark_ready(third)
    assert head_of(run).version == 2


def test_jobs_of_a_run_go_in_order(run: Run) -> None:
    first = ready(run, 0)
    second = commit(run, 1, first)
    third = commit(run, 2, second)
    assert third.job is not None and jobs.claim(third.job.pk, "eager") is None
    make_ready(second)
    assert jobs.claim(third.job.pk, "eager") is not None


def test_failure_takes_descendants_along(run: Run) -> None:
    first = ready(run, 0)
    second = commit(run, 1, first)
    third = commit(run, 2, second)
    services.mark_failed(second, "A part does not apply.")
    third.refresh_from_db()
    assert third.state == "failed" and "version 1, failed" in third.reason
    assert Job.objects.get(pk=third.job_id).state == "cancelled"
    assert head_of(run).version == 0


def test_a_failed_job_fails_its_version(run: Run) -> None:
    version = commit(run, 0)
    assert version.job is not None
    jobs.claim(version.job.pk, "worker")
    jobs.fail(version.job.pk, "worker", "Part 0 is damaged.")
    version.refresh_from_db()
    assert (version.state, version.reason) == ("failed", "Part 0 is damaged.")


def test_a_cancelled_job_fails_its_version(run: Run) -> None:
    version = commit(run, 0)
    assert version.job is not None
    jobs.cancel(version.job, "owner")
    version.refresh_from_db()
    assert version.state == "failed" and "owner" in version.reason


@pytest.mark.parametrize("state", ["ready", "retired", "failed", "building"])
def test_transitions_name_the_expected_state(run: Run, state: str) -> None:
    version = commit(run, 0)
    Version.objects.filter(pk=version.pk).update(state=state)
    with pytest.raises(WrongState):
        services.mark_ready(version)
    assert Version.objects.get(pk=version.pk).state == state


def test_ready_versions_never_fail(run: Run) -> None:
    version = ready(run, 0)
    with pytest.raises(WrongState):
        services.mark_failed(version, "late")


def test_a_protected_channel_stays(run: Run) -> None:
    versions = series(run, 1)
    Channel.objects.filter(run=run).update(protected=True)
    ready(run, 1, versions[0])
    assert head_of(run).version == 0


def test_changes_are_in_the_audit_log(run: Run) -> None:
    ready(run, 0)
    actions = set(Entry.objects.filter(project=run.project).values_list("action", flat=True))
    assert {"project.create", "run.create", "version.commit", "version.ready", "job.enqueue"} <= actions
