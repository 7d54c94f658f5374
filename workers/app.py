"""The Celery application, and how the control plane wakes it.

A message is a job's id and nothing else: the row is the truth, the message may be lost or come twice.
"""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

app = Celery("mailboat", include=["workers.tasks"])
app.config_from_object("workers.configuration")


def send(job_id: str, kind: str) -> None:
    """Wakes a worker for a queued job. Raises whatever the broker's client raises when it can't be reached."""
    from workers.configuration import QUEUES

    app.send_task("mailboat.job", args=[job_id], queue=QUEUES[kind], retry=False)
