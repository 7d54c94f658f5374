"""The Celery application, and how the control plane wakes it.

A message is a job's id and nothing else: the row is the truth, the message may be lost or come twice.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import django
from celery import Celery
from celery.signals import worker_ready, worker_shutting_down
from django.apps import apps

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
# Django's system checks import the whole API and every page; the tests run them, processes need not at each start.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")
if not apps.ready:  # Celery reads the configuration, which knows the models, before it sets Django up
    django.setup()

app = Celery("mailboat", include=["workers.tasks"])
app.config_from_object("workers.configuration")


CHECK_SECONDS = 3
HEADER = "mailboat_request"  # of a message: the number of the request that it came from


def send(job_id: str, kind: str) -> None:
    """Wakes a worker for a queued job. Raises whatever the broker's client raises when it can't be reached."""
    from controlplane.audit import middleware
    from controlplane.jobs.queues import QUEUES

    headers = {HEADER: middleware.current()}
    app.send_task("mailboat.job", args=[job_id], queue=QUEUES[kind], retry=False, headers=headers)


def check_broker() -> str:
    """Empty when a message could be sent. The default broker is the database, which is looked at anyway."""
    if str(app.conf.broker_url).startswith("pgmq:"):
        return ""
    with app.connection_for_write(connect_timeout=CHECK_SECONDS) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_max=0, timeout=CHECK_SECONDS)
    return ""


@worker_shutting_down.connect(weak=False)
def _end(**_: Any) -> None:
    """Ends the process at once when it is idle; a job that runs is told to stop, and is handed back.

    The usual way waits for the next poll and for pools of connections. Everything that matters is in the database.
    """
    from workers import lease
    from workers.presence import presence

    lease.stopping.set()
    if not lease.working.is_set():
        presence.leave()
        os._exit(0)


@worker_ready.connect(weak=False)
def _warm_up(sender: Any, **_: Any) -> None:
    """Says that it is there, and loads what the jobs of its queues need, so that the first one does not wait for it."""
    from controlplane.jobs.queues import QUEUES
    from workers.presence import presence

    served = sorted(sender.app.amqp.queues.consume_from)
    presence.begin(str(sender.hostname), served)
    kinds = {kind for kind, queue in QUEUES.items() if queue in served}
    for kind in kinds:
        import_module(f"workers.{kind}")
