"""A project with a run, and real workers on the test's own database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def _no_connection_is_left(django_db_setup: None) -> Iterator[None]:
    """The broker's connections would keep the test database from being dropped."""
    yield
    from workers.app import app

    app.close()
    app.pool.force_close_all()


@pytest.fixture
def run(transactional_db: None, home: Path) -> Any:
    """A run in a project of its own."""
    from controlplane.registry import services

    project = services.create_project("harbour", actor="test")
    return services.create_run(project, "pilot", actor="test")


@pytest.fixture
def unsent(settings: Any) -> list[str]:
    """Wake-ups are collected instead of sent; the list holds the ids of the jobs."""
    sent: list[str] = []
    _Collector.sent = sent
    settings.MAILBOAT_JOB_SENDER = "tests.workers.conftest.collect"
    return sent


class _Collector:
    sent: list[str] = []


def collect(job_id: str, _kind: str) -> None:
    _Collector.sent.append(job_id)


def lease_runs_out(job: Any) -> None:
    """Lets time pass for the lease of a worker that was killed, and the sweeper come by."""
    from controlplane.jobs import services

    type(job).objects.filter(pk=job.pk).update(lease_expires_at=timezone.now() - timedelta(seconds=1))
    services.requeue_expired()
    job.refresh_from_db()


StartWorker = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_worker(run: Any, database_url: str, home: Path, settings: Any) -> Iterator[StartWorker]:
    """Starts real Celery workers (or beat) on the test database; they end with the test."""
    started: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "DATABASE_URL": database_url,
        "MAILBOAT_HOME": str(home),
        "MAILBOAT_BLOB_ROOT": str(settings.MAILBOAT_BLOB_ROOT),
        "MAILBOAT_CHECKPOINT_ROOTS": os.pathsep.join(map(str, settings.MAILBOAT_CHECKPOINT_ROOTS)),
        "PYTHONPATH": str(CHECKOUT),
    }

    def start(*queues: str, **extra: str) -> subprocess.Popen[bytes]:
        arguments = ["worker", "--queues", ",".join(queues), "--hostname", f"{queues[0]}@test", "--pool", "solo"]
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "INFO"]
        with (home / f"worker-{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.workers.halting", *arguments],
                cwd=CHECKOUT, env={**environment, **extra}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
