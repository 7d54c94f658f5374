"""Real workers over the real queue: wake-ups, lost messages, killed workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection

from tests.waiting import eventually
from tests.workers.conftest import StartWorker
from tests.workers.halting import HALT, stands_still


def enqueue(run: Any, key: str = "one") -> Any:
    """A job that ends at once: its version does not exist."""
    from controlplane.jobs import services

    job, _ = services.enqueue("validate", run, {"version": 99}, key)
    job.refresh_from_db()
    return job


def ended(job: Any) -> bool:
    job.refresh_from_db()
    return bool(job.finished)


def test_a_message_wakes_a_worker(run: Any, start_worker: StartWorker) -> None:
    job = enqueue(run)
    assert job.sent_at is not None
    start_worker("publish")
    eventually(lambda: ended(job))
    assert job.state == "failed"
    assert "99" in job.error
    second = enqueue(run, "two")
    eventually(lambda: ended(second))


def test_the_number_of_a_request_follows_its_job_into_the_worker(
    run: Any, start_worker: StartWorker, home: Any
) -> None:
    from controlplane.audit import middleware

    middleware.begin("voyage-0003")
    first = enqueue(run)
    middleware.begin("")
    start_worker("publish")
    eventually(lambda: ended(first))
    line = eventually(lambda: next((line for line in lines(home) if "job begun" in line), None))
    assert "request_id='voyage-0003'" in line
    assert str(first.pk) in line


def lines(home: Any) -> list[str]:
    return [line for log in home.glob("worker-*.log") for line in log.read_text().splitlines()]


def test_another_broker_is_a_setting(run: Any, database_url: str) -> None:
    environment = {**os.environ, "DATABASE_URL": database_url, "MAILBOAT_BROKER_URL": "amqp://rabbit.example/mailboat"}
    ask = "from workers.app import app; print(app.conf.broker_url, app.conf.broker_transport_options)"
    said = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "amqp://rabbit.example/mailboat {}"


def test_a50_a_lost_message_is_sent_again_by_the_sweeper(run: Any, start_worker: StartWorker) -> None:
    from controlplane.jobs.models import Job
    from workers.sweep import sweep

    enqueue(run, "before")  # the first message makes the queue
    with connection.cursor() as cursor:
        cursor.execute("select pgmq.purge_queue('publish')")  # also what a worker of another test was killed with
        job = enqueue(run)
        cursor.execute("select pgmq.purge_queue('publish')")
        assert cursor.fetchone()[0] == 1
    start_worker("publish")
    Job.objects.filter(pk=job.pk).update(sent_at=None)
    sweep()
    eventually(lambda: ended(job))


def test_a_worker_whose_database_is_away_at_an_acknowledgement_takes_the_next_message(
    run: Any, start_worker: StartWorker, home: Any
) -> None:
    worker = start_worker("publish", **{HALT: "workers.transport:Channel.basic_ack:1"})
    first = enqueue(run)
    eventually(lambda: stands_still(worker))
    assert ended(first)
    with database_away():
        worker.send_signal(signal.SIGCONT)
        eventually(lambda: any("Couldn't ack" in line for line in lines(home)))
    second = enqueue(run, "two")
    eventually(lambda: ended(second))
    assert worker.poll() is None


@contextmanager
def database_away() -> Iterator[None]:
    """As if the database had gone down: whoever is connected is thrown out, and nobody gets in."""
    name = connection.settings_dict["NAME"]
    connection.close()
    place = connection.get_connection_params()
    login = {key: place[key] for key in ("host", "port", "user", "password") if key in place}
    with psycopg.connect(**login, dbname="postgres", autocommit=True) as server:
        server.execute(f'alter database "{name}" with allow_connections false')
        try:
            gone = server.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            assert gone.rowcount
            yield
        finally:
            server.execute(f'alter database "{name}" with allow_connections true')


def test_a_message_whose_acknowledgement_failed_does_not_stop_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that dies at that moment made a worker deaf that takes one message at a time."""
    from kombu.transport import pgmq, virtual

    from workers.app import app
    from workers.transport import Channel, Transport

    assert app.connection_for_read("pgmq://localhost").get_transport_cls() is Transport

    def refuse(*_: object) -> None:
        raise ConnectionError("the database went away")

    channel = object.__new__(Channel)
    channel._qos = virtual.QoS(channel, prefetch_count=1)
    channel.qos.append(object(), "tag")
    assert not channel.qos.can_consume()
    monkeypatch.setattr(pgmq.Channel, "basic_ack", refuse)
    with pytest.raises(ConnectionError):
        channel.basic_ack("tag")
    assert channel.qos.can_consume()
