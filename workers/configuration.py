"""Celery's settings, read from Django's when they are first needed.

The default broker is the control plane's own PostgreSQL through kombu's `pgmq://`. Its reply queues have names that are
too long, so everything that workers would say among themselves (remote control, gossip, mingle, heartbeat) stays off;
people look at job rows instead. `MAILBOAT_BROKER_URL` names another broker.
"""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab
from django.db import connection
from kombu.entity import Queue
from kombu.transport import TRANSPORT_ALIASES
from psycopg.conninfo import make_conninfo

from controlplane import env
from controlplane.jobs.queues import HOUSEKEEPING, NAMES
from controlplane.jobs.schedule import SCHEDULE, Entry


def _database() -> str:
    settings = connection.settings_dict
    known = {"host": settings["HOST"], "port": settings["PORT"], "dbname": settings["NAME"], "user": settings["USER"]}
    given = {key: str(value) for key, value in known.items() if value}
    if settings["PASSWORD"]:
        given["password"] = settings["PASSWORD"]
    return make_conninfo(**given, **{key: str(value) for key, value in settings["OPTIONS"].items()})


TRANSPORT_ALIASES["pgmq"] = "workers.transport:Transport"
broker_url = env.secret("MAILBOAT_BROKER_URL") or "pgmq://localhost"  # the address stands in conn_string
broker_transport_options = (
    {
        "conn_string": _database(),
        "init_extension": False,  # a migration installs the plain SQL
        "use_notify": True,
        "notify_throttle_interval_ms": 0,  # a throttled wake-up is a lost one
        "wait_time_seconds": 0,
        "polling_interval": 2.0,  # how long a message waits when its wake-up was lost
        "visibility_timeout": 1800,  # a message that comes again finds the job leased or finished, so this may be short
        "pool_size": 2,
        "pool_timeout": 10,
    }
    if broker_url.startswith("pgmq:")
    else {}
)
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
broker_connection_timeout = 10
broker_pool_limit = 2

task_queues = [
    Queue(name, routing_key=name)  # type: ignore[no-untyped-call]
    for name in NAMES
]
task_default_queue = HOUSEKEEPING
task_ignore_result = True
task_acks_late = True
task_reject_on_worker_lost = True
task_serializer = "json"
accept_content = ["json"]

worker_concurrency = 1  # one job at a time, and no message waits in a worker that has one while another is free
worker_prefetch_multiplier = 1
worker_enable_remote_control = False
worker_send_task_events = False
worker_hijack_root_logger = False
worker_redirect_stdouts = False
worker_cancel_long_running_tasks_on_connection_loss = False


def _beat(entry: Entry) -> dict[str, Any]:
    if entry.at is not None:
        hour, minute = entry.at
        return {"task": entry.task, "schedule": crontab(hour=hour, minute=minute), "options": {"expires": 3600.0}}
    # A round that nobody took before the next one is due is of no use.
    return {"task": entry.task, "schedule": entry.seconds, "options": {"expires": entry.seconds}}


timezone = "UTC"
beat_schedule = {entry.name: _beat(entry) for entry in SCHEDULE}
