"""Derived runs: a worker publishes each version of a run in another format, signed, and a replay makes it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.jobs import triggers
from controlplane.jobs.models import Job
from controlplane.registry import deriving, services
from controlplane.registry.errors import Refusal, Unacceptable
from controlplane.registry.models import Patch, Run, RunKey, Version
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.manifest import Envelope
from mailboat.quantise.source import QuantisedSource
from mailboat.signing import signers
from tests.quantise.models import folder, masters, step
from tests.workers.checkpoints import commit
from tests.workers.test_merge import carry_out

pytestmark = pytest.mark.usefixtures("unsent")


@pytest.fixture
def line(run: Run, tmp_path: Path, settings: Any) -> list[Path]:
    """Checkpoints of a model that is trained, under an allowed folder; the source merges nothing."""
    settings.MAILBOAT_CHECKPOINT_ROOTS = (tmp_path,)
    Run.objects.filter(pk=run.pk).update(merge_up_to=0)
    weights, found = masters(), []
    for number in range(3):
        found.append(folder(tmp_path / f"v{number}", weights))
        weights = step(weights, number)
    return found


def work() -> None:
    """Carries out what is queued, in its order, until nothing is left."""
    for _ in range(60):
        queued = Job.objects.filter(state="queued").exclude(kind="merge").exclude(after__state__in=Job.UNFINISHED)
        job = queued.order_by("waiting_for", "queued_at").first()
        if job is None:
            return
        Job.objects.filter(pk=job.pk).update(waiting_for="", not_before=None)
        carried = carry_out(job)
        assert carried.state == "succeeded" or carried.state == "queued", carried.error
    raise AssertionError("it never ends")


def digest_of(path: Path, form: str) -> str:
    with Checkpoint.open(path) as checkpoint:
        return measure(QuantisedSource(checkpoint, form)).digest


def test_every_version_follows_number_for_number(run: Run, line: list[Path]) -> None:
    derived = deriving.create(run.project, "pilot-fp8", run.name, "fp8-block", actor="test")
    for number, path in enumerate(line):
        commit(run, path, number, number - 1 if number else None)
        work()
    found = list(Version.objects.filter(run=derived).order_by("number"))
    assert [(v.number, v.state, v.source and v.source.number) for v in found] == [
        (0, "ready", 0), (1, "ready", 1), (2, "ready", 2),
    ]  # fmt: skip
    assert [v.state_digest for v in found] == [digest_of(path, "fp8-block") for path in line]
    assert [patch.to_version.number for patch in Patch.objects.filter(run=derived, kind="step").order_by("pk")] == [
        1,
        2,
    ]
    assert derived.channels.get(name="latest").version == found[-1]
    key = RunKey.objects.get(run=derived)
    assert key.kind == "derived"
    for version in found:
        assert signers(Envelope.from_dict(version.envelope), [key.public_key]) == {key.public_key}
    rows = deriving.side_by_side(run, 2)
    assert [(row["number"], [cell.run.name for cell in row["cells"]]) for row in rows] == [
        (2, ["pilot", "pilot-fp8"]), (1, ["pilot", "pilot-fp8"]),
    ]  # fmt: skip


def test_a_replay_quantises_again_from_the_source(run: Run, line: list[Path]) -> None:
    commit(run, line[0], 0)
    work()
    derived = deriving.create(run.project, "pilot-nvfp4", run.name, "nvfp4", actor="test")
    work()
    job = carry_out(triggers.replay(run.project, derived.name, 0, actor="test")[0])
    assert job.state == "succeeded", job.error
    assert job.result is not None and job.result["requantised"] is True
    Run.objects.filter(pk=derived.pk).update(quantiser={"format": "mxfp4"})
    job = carry_out(triggers.replay(run.project, derived.name, 0, actor="test")[0])
    assert job.state == "failed"


def test_a_derived_run_begins_late_and_has_its_sources_holes(run: Run, line: list[Path]) -> None:
    commit(run, line[0], 0)
    work()
    bad = commit(run, line[1], 1, 0)
    services.mark_failed(bad, "The disk was lost.")
    Job.objects.filter(pk=bad.job_id).update(state="failed")
    derived = deriving.create(run.project, "pilot-int4", run.name, "int4", actor="test")
    work()
    commit(run, line[2], 2, 0)
    work()
    found = Version.objects.filter(run=derived).order_by("number")
    assert list(found.values_list("number", "parent__number")) == [(0, None), (2, 0)]


def test_a_source_that_begins_an_epoch_leads_the_derived_run_along(run: Run, line: list[Path]) -> None:
    derived = deriving.create(run.project, "pilot-fp8", run.name, "fp8-channel", actor="test")
    for number in range(2):
        commit(run, line[number], number, number - 1 if number else None)
        work()
    services.begin_epoch(run, 0, "Resumed.", actor="test")
    services.commit_checkpoint(run, str(line[2]), 2, 0, 1, actor="test")
    work()
    last = Version.objects.get(run=derived, number=2)
    assert last.parent is not None
    assert (last.state, last.epoch.number, last.parent.number) == ("ready", 1, 0)


def test_nobody_else_publishes_into_a_derived_run(run: Run, line: list[Path]) -> None:
    derived = deriving.create(run.project, "pilot-fp8", run.name, "fp8-block", actor="test")
    with pytest.raises(Refusal) as refusal:
        services.commit_checkpoint(derived, str(line[0]), 0, None, 0, actor="test")
    assert refusal.value.code == "derived_run"
    with pytest.raises(Unacceptable):
        deriving.create(run.project, "x", run.name, "fp7", actor="test")
    with pytest.raises(Unacceptable):
        deriving.create(run.project, "x", derived.name, "nvfp4", actor="test")
    with pytest.raises(Refusal):
        deriving.create(run.project, "pilot-fp8", run.name, "nvfp4", actor="test")
