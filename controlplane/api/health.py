"""Whether the process lives, and whether it can do its work."""

# ruff: noqa: ARG001  Django hands the request over

from __future__ import annotations

from collections.abc import Callable

import structlog
from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse
from django.utils.module_loading import import_string

from controlplane.registry import blobs

log = structlog.get_logger(__name__)


def live(request: HttpRequest) -> JsonResponse:
    """200 while the process answers at all."""
    return JsonResponse({"status": "live"})


def ready(request: HttpRequest) -> JsonResponse:
    """200 when database, migrations, blob store and broker are in order; 503 with the names of those that are not."""
    checks = {"database": _database, "migrations": _migrations, "blobs": _blobs, "broker": _broker}
    problems = {name: problem for name, check in checks.items() if (problem := _try(name, check))}
    body = {"status": "not ready" if problems else "ready", "problems": problems}
    return JsonResponse(body, status=503 if problems else 200)


def _try(name: str, check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  the answer is for strangers; the log has the details
        log.warning("not ready", check=name, error=str(error).strip())
        return "It can't be reached; the server's log says why."


def _database() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return ""


def _migrations() -> str:
    executor = MigrationExecutor(connection)
    pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
    return f"{len(pending)} migrations are not applied; run `manage.py migrate`." if pending else ""


def _blobs() -> str:
    return blobs.store().check()


def _broker() -> str:
    check: Callable[[], str] = import_string(settings.MAILBOAT_BROKER_CHECK)
    return check()
