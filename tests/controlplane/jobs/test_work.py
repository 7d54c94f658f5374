"""Queues, workers, the schedule, logs, and running a job again."""

from __future__ import annotations

import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.audit.models import Entry
from controlplane.fleet import services as fleet
from controlplane.jobs import presence, queues, schedule, selectors, services, triggers
from controlplane.jobs.models import Job, ScheduledRun, Worker
from controlplane.registry import services as registry
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project, Run
from tests.controlplane.conftest import enrol
from tests.controlplane.making import series

CHECKOUT = Path(__file__).resolve().parents[3]


def queue(name: str, project: Project | None = None) -> selectors.QueueRow:
    return next(row for row in selectors.queues(project) if row.name == name)


def worker(name: str = "check@mailboat", **options: Any) -> Worker:
    facts: dict[str, Any] = {"queues": ["check"], "device": "cpu: test, 2 cores", "versions": {"python": "3.11"}}
    return presence.register(name, "host", 42, **(facts | options))


def test_every_kind_of_job_has_a_queue() -> None:
    known = {kind for kind in Job.Kind.values if (CHECKOUT / "workers" / f"{kind}.py").exists()}
    assert set(queues.QUEUES) == known >= {"build", "merge"}


def test_a_queue_tells_depth_and_age_of_what_could_start(project: Project, foreign: Project, run: Run) -> None:
    first, _ = services.enqueue("replay", run, {"version": 0}, "a")
    services.enqueue("replay", run, {"version": 1}, "b", after=first)
    services.enqueue("verify", None, {}, "c", project=foreign)
    Job.objects.filter(pk=first.pk).update(queued_at=Now() - timedelta(seconds=90))
    row = queue("check", project)
    assert (row.queued, row.waiting, row.running, row.workers) == (1, 1, 0, 0)
    assert row.oldest_seconds is not None and 89 < row.oldest_seconds < 1000
    assert queue("check").queued == 2
    services.claim(first.pk, "w")
    services.park(first.pk, "w", "an answer", until=timedelta(minutes=1), saved={})
    row = queue("check", project)
    assert (row.queued, row.waiting, row.oldest_seconds) == (0, 2, None)
    assert queue("publish").queued == 0


def test_messages_are_counted_where_postgresql_is_the_broker(db: None) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pgmq.create('check')")
        cursor.execute("SELECT pgmq.send('check', '{}')")
    row = queue("check")
    assert row.messages == 1 and row.oldest_message_seconds is not None


def test_a_worker_is_online_lost_or_stopped_by_the_clock_of_the_database(project: Project, run: Run) -> None:
    row = worker()
    job, _ = services.enqueue("replay", run, {"version": 0}, "a")
    assert presence.beat(row.pk, job.pk)
    (shown,) = selectors.workers(project)
    assert (shown.state, shown.busy, shown.job) == ("online", True, job)
    assert queue("check").workers == 1
    Worker.objects.update(heartbeat_at=Now() - timedelta(seconds=60))
    (shown,) = selectors.workers(project)
    assert (shown.state, shown.busy) == ("lost", False) and "60 s" in shown.reason
    assert queue("check").workers == 0
    presence.stopped(row.pk)
    assert selectors.workers(project) == []
    assert [item.state for item in selectors.workers(project, gone=True)] == ["stopped"]
    assert presence.forget_gone() == 0
    Worker.objects.update(heartbeat_at=Now() - timedelta(days=2))
    assert presence.forget_gone() == 1
    assert not presence.beat(row.pk, None)


def test_the_stranger_sees_that_a_worker_is_busy_but_not_with_what(foreign: Project, run: Run) -> None:
    job, _ = services.enqueue("replay", run, {"version": 0}, "a")
    presence.beat(worker().pk, job.pk)
    (shown,) = selectors.workers(foreign)
    assert (shown.busy, shown.job) == (True, None)


def test_the_schedule_shows_how_each_entry_went(db: None) -> None:
    assert {row.entry.name for row in selectors.schedule()} == {entry.name for entry in schedule.SCHEDULE}
    assert all(row.last is None for row in selectors.schedule())
    schedule.ran("scrub", lambda: None)
    with pytest.raises(OSError, match="full"):
        schedule.ran("tidy", broken)
    last = {row.entry.name: row.last for row in selectors.schedule()}
    assert last["scrub"] is not None and last["scrub"].error == "" and last["scrub"].seconds is not None
    assert last["tidy"] is not None and "full" in last["tidy"].error
    schedule.ran("tidy", lambda: None)
    assert ScheduledRun.objects.get(name="tidy").error == ""


def broken() -> None:
    raise OSError("the disk is full")


def test_the_schedule_is_what_the_scheduler_runs() -> None:
    from workers import configuration, tasks  # noqa: F401  registers the tasks
    from workers.app import app

    assert set(configuration.beat_schedule) == {entry.name for entry in schedule.SCHEDULE}
    assert {entry.task for entry in schedule.SCHEDULE} <= set(app.tasks)
    when = {entry.name: entry.when for entry in schedule.SCHEDULE}
    assert (when["sweep"], when["heads"], when["scrub"]) == ("every 3 s", "every 1 min", "daily at 03:17 UTC")


def test_the_nightly_scrub_asks_every_island_that_is_there(run: Run) -> None:
    from workers.scrub import scrub

    version = series(run, 1)[0]
    for name in ("porto", "oslo", "lost", "empty"):
        island, _ = enrol(run, name)
        if name != "empty":
            fleet.report_sync(
                island, from_version=None, version=0, digest=version.state_digest, outcome="applied", verified=True
            )
        if name == "lost":
            type(island).objects.filter(pk=island.pk).update(last_seen_at=Now() - timedelta(hours=1))
    assert scrub() == 2
    assert scrub() == 2
    assert Job.objects.filter(kind="verify", requested_by="schedule:scrub").count() == 2


def test_a_failed_job_is_run_again_with_what_it_was_given(run: Run) -> None:
    series(run, 1)
    job, _ = triggers.replay(run.project, run.name, 0, actor="owner")
    with pytest.raises(Refusal):
        services.rerun(job, "owner")
    services.claim(job.pk, "w")
    services.fail(job.pk, "w", "no")
    job.refresh_from_db()
    again, new = services.rerun(job, "owner")
    assert new and (again.params, again.run, again.rerun_of) == (job.params, run, job)
    joined, new = services.rerun(job, "mate")
    assert not new and joined.pk == again.pk
    assert Entry.objects.filter(action="job.enqueue", target=f"job {again.pk}", actor="owner").exists()


def test_jobs_that_end_with_their_version_are_not_run_again(run: Run) -> None:
    job, _ = services.enqueue("validate", run, {"version": 0}, "v")
    services.claim(job.pk, "w")
    services.fail(job.pk, "w", "no")
    job.refresh_from_db()
    with pytest.raises(Refusal) as refusal:
        services.rerun(job, "owner")
    assert refusal.value.code == "not_rerunnable"


def test_the_log_has_levels_and_goes_on_after_a_line(run: Run) -> None:
    job, _ = services.enqueue("replay", run, {}, "a")
    for level in ("info", "warning", "error", "info"):
        services.log(job.pk, level, level)
    assert [line.level for line in selectors.events(job, level="warning")] == ["warning", "error"]
    first = selectors.events(job, limit=1)[0]
    assert [line.message for line in selectors.events(job, after=first.pk)] == ["warning", "error", "info"]


def test_work_over_http(run: Run, token: Any) -> None:
    series(run, 1)
    operator = token("operator")
    made = operator.post("jobs", {"kind": "replay", "run": run.name, "version": 0}).json()
    services.claim(made["id"], "w")
    services.fail(made["id"], "w", "no")
    lines = operator.get(f"jobs/{made['id']}/events?limit=1").json()
    assert len(lines["results"]) == 1
    rest = operator.get(f"jobs/{made['id']}/events?level=error&after={lines['next']}").json()
    assert [line["message"] for line in rest["results"]] == ["no"] and rest["next"] is None
    assert operator.get(f"jobs/{made['id']}/events?level=loud").status_code == 400
    again = operator.post(f"jobs/{made['id']}/rerun")
    assert (again.status_code, again.json()["rerun_of"]) == (202, made["id"])
    assert operator.post(f"jobs/{made['id']}/rerun").status_code == 200
    assert operator.post(f"jobs/{uuid.uuid4()}/rerun").status_code == 404
    worker()
    assert operator.get("workers").json()["results"][0]["device"] == "cpu: test, 2 cores"
    assert {row["name"] for row in operator.get("queues").json()["results"]} == set(queues.NAMES)
    assert len(operator.get("schedule").json()["results"]) == len(schedule.SCHEDULE)


def test_heads_are_renewed_by_the_schedule(run: Run) -> None:
    series(run, 1)
    schedule.ran("heads", registry.renew_heads)
    assert ScheduledRun.objects.get(name="heads").error == ""
