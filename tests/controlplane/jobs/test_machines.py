"""State machines under any order of calls: jobs with leases, and versions with commits, failures and the channel."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import pytest
from django.db import transaction
from django.db.models.functions import Now
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import services as registry
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Channel, Run, Version
from tests.controlplane.making import build, upload

pytestmark = pytest.mark.django_db
WORKERS = st.sampled_from(["w1", "w2"])
NAMES = count()
MODEST = settings(max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))


class InTransaction(RuleBasedStateMachine):
    """Each example lives in a savepoint that is rolled back."""

    project = None

    def __init__(self) -> None:
        super().__init__()
        self.atomic = transaction.atomic()
        self.atomic.__enter__()
        self.run = registry.create_run(self.project, f"run-{next(NAMES)}", actor="test")  # type: ignore[arg-type]
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.atomic.__exit__(None, None, None)


class JobMachine(InTransaction):
    """A model of one job: who holds it, whether the lease is over, how it ended."""

    def start(self) -> None:
        self.job, _ = jobs.enqueue("replay", self.run, {}, "key")
        self.state, self.owner, self.over, self.attempt = "queued", "", False, 1
        self.waiting, self.saved = False, None

    @rule(worker=WORKERS)
    def claim(self, worker: str) -> None:
        got = jobs.claim(self.job.pk, worker)
        assert (got is not None) == (self.state == "queued" and not self.waiting)
        if got:
            assert got.saved == self.saved
            self.state, self.owner, self.over = "running", worker, False

    @rule(worker=WORKERS, saved=st.dictionaries(st.sampled_from("ab"), st.integers()), still=st.booleans())
    def park(self, worker: str, saved: dict[str, int], still: bool) -> None:
        def call() -> None:
            jobs.park(self.job.pk, worker, "an answer", until=timedelta(hours=1), saved=saved, still=lambda: still)

        if not self.held(worker):
            with pytest.raises(jobs.LostLease):
                call()
            return
        call()
        if self.state == "cancelling":
            self.state = "cancelled"
        else:
            self.state, self.owner, self.waiting, self.saved = "queued", "", still, saved

    @rule()
    def wake(self) -> None:
        assert jobs.wake(self.job.pk) == (self.state == "queued" and self.waiting)
        self.waiting = False

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_long_enough(self) -> None:
        Job.objects.filter(pk=self.job.pk).update(not_before=Now() - timedelta(seconds=1))
        if self.state == "queued":
            self.waiting = False  # as far as a worker sees; nobody needs to wake it any more
            Job.objects.filter(pk=self.job.pk).update(waiting_for="")

    def held(self, worker: str) -> bool:
        return self.state in {"running", "cancelling"} and self.owner == worker

    @rule(worker=WORKERS)
    def renew(self, worker: str) -> None:
        if self.held(worker):
            assert jobs.renew(self.job.pk, worker) == self.state
            self.over = False
        else:
            with pytest.raises(jobs.LostLease):
                jobs.renew(self.job.pk, worker)

    @rule(worker=WORKERS, good=st.booleans())
    def end(self, worker: str, good: bool) -> None:
        def call() -> None:
            jobs.succeed(self.job.pk, worker) if good else jobs.fail(self.job.pk, worker, "no")

        if self.held(worker):
            call()
            self.state = "succeeded" if good else "failed"
        else:
            with pytest.raises(jobs.LostLease):
                call()

    @rule(worker=WORKERS)
    def stop(self, worker: str) -> None:
        if self.state == "cancelling" and self.owner == worker:
            jobs.cancelled(self.job.pk, worker)
            self.state = "cancelled"
        else:
            with pytest.raises(jobs.LostLease):
                jobs.cancelled(self.job.pk, worker)

    @rule()
    def cancel(self) -> None:
        if self.state in {"succeeded", "failed", "cancelled"}:
            with pytest.raises(jobs.TooLate):
                jobs.cancel(self.job, "owner")
        else:
            jobs.cancel(self.job, "owner")
            self.state = "cancelled" if self.state == "queued" else "cancelling"
            self.waiting = False

    @rule()
    def rerun(self) -> None:
        if self.state not in {"failed", "cancelled"}:
            with pytest.raises(Refusal):
                jobs.rerun(Job.objects.get(pk=self.job.pk), "owner")
            return
        job, new = jobs.rerun(Job.objects.get(pk=self.job.pk), "owner")
        assert new and job.rerun_of_id == self.job.pk and job.params == self.job.params
        self.job, self.state, self.owner, self.over, self.attempt = job, "queued", "", False, 1
        self.waiting, self.saved = False, None

    @precondition(lambda self: self.state in {"running", "cancelling"})
    @rule()
    def lose_worker(self) -> None:
        Job.objects.filter(pk=self.job.pk).update(lease_expires_at=Now() - timedelta(seconds=1))
        self.over = True

    @rule()
    def sweep(self) -> None:
        jobs.requeue_expired()
        if self.over and self.state in {"running", "cancelling"}:
            if self.state == "cancelling":
                self.state = "cancelled"
            elif self.attempt >= jobs.MAX_ATTEMPTS:
                self.state = "failed"
            else:
                self.state, self.owner, self.attempt = "queued", "", self.attempt + 1
            self.over = False

    @invariant()
    def the_row_agrees(self) -> None:
        row = Job.objects.get(pk=self.job.pk)
        assert (row.state, row.attempt) == (self.state, self.attempt)
        assert row.finished == (row.finished_at is not None)
        assert (row.lease_expires_at is not None) == (row.state in {"running", "cancelling"})


class VersionMachine(InTransaction):
    """Publishing and working in any order never breaks the chain."""

    def start(self) -> None:
        self.salt = count()
        self.heads: list[int] = []

    def newest(self) -> Version | None:
        return Version.objects.filter(run=self.run).exclude(state="failed").order_by("-number").first()

    def next(self) -> int:
        return Version.objects.filter(run=self.run).count()

    @rule()
    def publish(self) -> None:
        built = build(self.run, self.next(), self.newest(), salt=str(next(self.salt)))
        upload(self.run, built)
        _, new = registry.commit_manifest(self.run, built.envelope, built.anchor, actor="test")
        assert new

    @rule(number=st.integers(0, 6), on=st.none() | st.integers(0, 6))
    def publish_anything(self, number: int, on: int | None) -> None:
        parent = None if on is None else Version.objects.filter(run=self.run, number=on).first()
        expected, following = self.newest(), self.next()
        if parent is not None and parent.number >= number:
            return
        built = build(self.run, number, parent, salt=str(next(self.salt)))
        upload(self.run, built)
        try:
            registry.commit_manifest(self.run, built.envelope, built.anchor, actor="test")
        except Refusal:
            assert (number, parent) != (following, expected)
        else:
            assert (number, parent) == (following, expected)

    @rule(good=st.booleans(), pick=st.integers(0, 3))
    def work(self, good: bool, pick: int) -> None:
        waiting = list(Job.objects.filter(run=self.run, kind="validate", state="queued").order_by("queued_at"))
        if not waiting:
            return
        version = Version.objects.get(job=waiting[pick % len(waiting)])
        assert version.job is not None
        first = Version.objects.filter(run=self.run, state__in=Version.IN_FLIGHT).order_by("number").first()
        if jobs.claim(version.job.pk, "w1") is None:
            assert version != first
            return
        assert version == first, "jobs of a run go in the order of its numbers"
        registry.begin_validating(version)
        if good:
            registry.mark_ready(version)
            jobs.succeed(version.job.pk, "w1")
            self.heads.append(version.number)
        else:
            jobs.fail(version.job.pk, "w1", "It does not apply.")

    @invariant()
    def the_chain_holds(self) -> None:
        rows = list(Version.objects.filter(run=self.run).select_related("parent").order_by("number"))
        assert [row.number for row in rows] == list(range(len(rows)))
        in_flight = [row.number for row in rows if row.state in Version.IN_FLIGHT]
        good = [row.number for row in rows if row.state == "ready"]
        assert not in_flight or not good or max(good) < min(in_flight)
        for row in rows:
            if row.parent is not None and row.state != "failed":
                assert row.parent.state != "failed" and row.parent.number < row.number
                between = [r.state for r in rows if row.parent.number < r.number < row.number]
                assert set(between) <= {"failed"}
        channel = Channel.objects.get(run=self.run, name="latest")
        assert (channel.version and channel.version.number) == (self.heads[-1] if self.heads else None)
        assert channel.serial == len(self.heads)


@pytest.mark.parametrize("machine", [JobMachine, VersionMachine])
def test_machine(machine: type[InTransaction], run: Run) -> None:
    machine.project = run.project  # type: ignore[assignment]
    run_state_machine_as_test(machine, settings=MODEST)  # type: ignore[no-untyped-call]
