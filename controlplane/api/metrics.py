"""`/metrics` for Prometheus: every figure is read from the database at the moment of the scrape.

So a restart forgets nothing, several web processes say the same, and nothing is counted where it happens. Names and
alert rules stand in docs/operators.md. The figures name projects, runs and channels, hence not everybody may read
them: `Authorization: Bearer` with MAILBOAT_METRICS_TOKEN, or, where that is not set, this machine alone.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Count, OuterRef, Subquery
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from controlplane.fleet import outline
from controlplane.fleet.models import Challenge, SyncReport
from controlplane.fleet.status import Health, Sync
from controlplane.jobs import selectors as jobs
from controlplane.registry import clock
from controlplane.registry.models import Channel, Project, Version
from mailboat import __version__

LATELY = timedelta(hours=1)
_PULLS = """
    SELECT p.slug, r.name, percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY (s.seconds->>'total')::float)
    FROM fleet_syncreport s
    JOIN fleet_island i ON i.id = s.island_id
    JOIN registry_run r ON r.id = i.run_id
    JOIN registry_project p ON p.id = i.project_id
    WHERE s.accepted AND jsonb_typeof(s.seconds->'total') = 'number'
      AND s.reported_at > statement_timestamp() - make_interval(secs => %s)
    GROUP BY 1, 2 ORDER BY 1, 2
"""
FORWARDED = ("X-Forwarded-For", "Forwarded", "X-Real-IP")


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """The text that Prometheus reads; 401 for whoever may not."""
    if not _allowed(request):
        return HttpResponse(
            "Send MAILBOAT_METRICS_TOKEN as a bearer token; without such a setting only this machine may ask.\n",
            status=401, content_type="text/plain", headers={"WWW-Authenticate": 'Bearer realm="mailboat metrics"'},
        )  # fmt: skip
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures())
    return HttpResponse(
        generate_latest(registry), content_type=CONTENT_TYPE_LATEST, headers={"Cache-Control": "no-store"}
    )


def _allowed(request: HttpRequest) -> bool:
    expected = settings.MAILBOAT_METRICS_TOKEN
    if expected:
        scheme, _, offered = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(offered.strip().encode(), expected.encode())
    if any(name in request.headers for name in FORWARDED):  # a proxy on this machine speaks for somebody else
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


class _Figures(Collector):
    """One scrape."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every family, a few queries each, however many islands there are (but four per project)."""
        yield _family("mailboat_build", "Version of the control plane.", ["version"], [([__version__], 1)])
        yield from _fleet()
        yield from _channels()
        yield from _syncs()
        yield from _queues()
        yield _verifications()


def _family(name: str, help_: str, labels: list[str], samples: Iterable[tuple[list[str], Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_, labels=labels)
    for values, number in samples:
        if number is not None:
            family.add_metric(values, float(number))
    return family


def _fleet() -> Iterator[GaugeMetricFamily]:
    health: Counter[tuple[str, str]] = Counter()
    sync: Counter[tuple[str, str]] = Counter()
    versions: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], int] = {}
    alarms: Counter[tuple[str, str]] = Counter()
    for project in Project.objects.order_by("slug"):
        health.update({(project.slug, state): 0 for state in Health})
        sync.update({(project.slug, state): 0 for state in Sync})
        for row in outline.standings(project):
            run = (project.slug, row.island.run_name)
            health[project.slug, row.health] += 1
            alarms[run] += bool(row.island.alarm)
            sync[project.slug, row.sync] += 1
            # An island that was switched off, or that is ahead after a rollback, is not late.
            if row.health != Health.DISABLED and row.sync in {Sync.CURRENT, Sync.BEHIND}:
                versions[run] = max(versions.get(run, 0), row.skew_versions or 0)
                seconds[run] = max(seconds.get(run, 0), row.skew_seconds or 0)
    yield _family("mailboat_islands", "Islands by health.", ["project", "health"], _samples(health))
    yield _family("mailboat_islands_by_sync", "Islands by sync status.", ["project", "sync"], _samples(sync))
    labels = ["project", "run"]
    refused = "Islands that refuse a head, manifest or blob as forged, replayed or expired."
    yield _family("mailboat_islands_alarmed", refused, labels, _samples(alarms))
    yield _family("mailboat_skew_versions_max", "Versions that the last island is behind.", labels, _samples(versions))
    yield _family("mailboat_skew_seconds_max", "Seconds that the last island is behind.", labels, _samples(seconds))


def _samples(found: dict[tuple[str, str], int]) -> list[tuple[list[str], int]]:
    return [([str(first), str(second)], number) for (first, second), number in sorted(found.items())]


def _channels() -> Iterator[GaugeMetricFamily]:
    now = clock.now()
    rows = list(
        Channel.objects.exclude(name__startswith=Channel.PINS)
        .filter(version__isnull=False)
        .order_by("run__project__slug", "run__name", "name")
        .values_list("run__project__slug", "run__name", "name", "version__number", "serial", "generation", "expires_at")
    )
    labels = ["project", "run", "channel"]
    yield _family(
        "mailboat_head_version", "Version that a channel points to.", labels, ((list(r[:3]), r[3]) for r in rows)
    )
    yield _family("mailboat_head_serial", "Serial of a channel's head.", labels, ((list(r[:3]), r[4]) for r in rows))
    expires = ((list(row[:3]), None if row[6] is None else (row[6] - now).total_seconds()) for row in rows)
    yield _family("mailboat_head_expires_seconds", "Seconds until a channel's head expires.", labels, expires)
    newest = Version.objects.filter(run=OuterRef("run"), state=Version.State.READY).order_by("-number").values("pk")[:1]
    ready = Version.objects.filter(pk=Subquery(newest)).values_list(
        "run__project__slug", "run__name", "patch_bytes", "full_bytes"
    )
    sizes = list(ready)
    yield _family(
        "mailboat_patch_bytes",
        "Size of the newest ready version's patch.",
        ["project", "run"],
        ((list(r[:2]), r[2]) for r in sizes),
    )
    yield _family(
        "mailboat_full_bytes",
        "Size of the newest ready version whole.",
        ["project", "run"],
        ((list(r[:2]), r[3]) for r in sizes),
    )


def _syncs() -> Iterator[GaugeMetricFamily]:
    lately = SyncReport.objects.filter(reported_at__gt=Now() - LATELY)
    counted = (
        lately.order_by()
        .values_list("island__project__slug", "island__run__name", "outcome")
        .annotate(number=Count("id"))
    )
    labels = ["project", "run", "outcome"]
    yield _family("mailboat_syncs_last_hour", "Syncs by outcome.", labels, ((list(r[:3]), r[3]) for r in counted))
    with connection.cursor() as cursor:
        cursor.execute(_PULLS, [LATELY.total_seconds()])
        quantiles = [
            ([slug, run, quantile], value)
            for slug, run, values in cursor.fetchall()
            for quantile, value in zip(("0.5", "0.95"), values, strict=True)
        ]
    labels = ["project", "run", "quantile"]
    yield _family("mailboat_pull_seconds", "From the head to a verified version, in the last hour.", labels, quantiles)


def _queues() -> Iterator[GaugeMetricFamily]:
    rows = jobs.queues()
    states = (([row.name, state], getattr(row, state)) for row in rows for state in ("queued", "waiting", "running"))
    yield _family("mailboat_queue_jobs", "Unfinished jobs.", ["queue", "state"], states)
    ages = (([row.name], row.oldest_seconds or 0) for row in rows)
    yield _family("mailboat_queue_oldest_seconds", "Age of the oldest job that could start.", ["queue"], ages)
    workers = (([row.name], row.workers) for row in rows)
    yield _family("mailboat_queue_workers", "Workers that are there.", ["queue"], workers)


def _verifications() -> GaugeMetricFamily:
    judged = (
        Challenge.objects.filter(created_at__gt=Now() - timedelta(days=1))
        .order_by()
        .values_list("island__project__slug", "state")
        .annotate(number=Count("id"))
    )
    samples = ((list(row[:2]), row[2]) for row in judged)
    return _family("mailboat_verifications_last_day", "Challenges by outcome.", ["project", "result"], samples)
