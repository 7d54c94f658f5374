"""Derived runs: the versions of one run in another served format, made by a worker, number for number.

A derived run has a publisher's key of its own, held by the worker that quantises; islands have to opt in to it by
name. Nobody else can publish into such a run. Numbers and epochs are those of the source: a version that failed there
leaves a hole here.
"""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, transaction

from controlplane.audit import services as audit
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry.errors import Missing, Refusal, Unacceptable
from controlplane.registry.models import Channel, Epoch, Project, Run, Version
from mailboat.quantise import FORMATS

State = Version.State


def create(project: Project, name: str, source: str, form: str, *, actor: str) -> Run:
    """A run that serves `source` in the format `form`, beginning with its newest ready version.

    Raises Missing, Refusal `run_exists`, Unacceptable `format_unknown`, `source_derived`.
    """
    origin = Run.objects.filter(project=project, name=source).first()
    if origin is None:
        raise Missing(f"There is no run {source} in this project.")
    if form not in FORMATS:
        raise Unacceptable(f"There is no format {form}; choose among {', '.join(FORMATS)}.", code="format_unknown")
    if origin.source_id is not None:
        raise Unacceptable(f"{source} is derived itself; derive from its source.", code="source_derived")
    try:
        with transaction.atomic():
            run = Run.objects.create(
                project=project, name=name, served_format=form, source=origin, quantiser={"format": form}
            )
            Epoch.objects.create(run=run, number=0, reason=f"The run begins, derived from {source}.")
            Channel.objects.create(run=run, name=Channel.LATEST)
            audit.record(project, actor, "run.create", f"run {name}", after={"source": source, "format": form})
            newest = Version.objects.filter(run=origin, state=State.READY).order_by("-number").first()
            if newest is not None:
                enqueue(run, newest, actor=actor)
    except IntegrityError:
        raise Refusal(f"There is a run {name} already; use it or choose another name.", code="run_exists") from None
    run.refresh_from_db()
    return run


def queue(version: Version) -> None:
    """A version has become ready: every run that is derived from its run follows."""
    for run in Run.objects.filter(source=version.run_id).select_related("project"):
        enqueue(run, version)


def enqueue(run: Run, version: Version, *, actor: str = "system") -> tuple[Job, bool]:
    """Queues the work on one version of the source, behind what is unfinished before it."""
    before = Job.objects.filter(run=run, kind=Job.Kind.DERIVE, state__in=Job.UNFINISHED).order_by("-queued_at").first()
    return jobs.enqueue(
        Job.Kind.DERIVE,
        run,
        {"version": version.number},
        f"derive:{run.pk}:{version.number}",
        requested_by=actor,
        after=before,
    )


def require_publishable(run: Run, source: Version | None, number: int) -> None:
    """Whether a commit may go into a run: into a derived one only its worker's, under the source's number.

    Raises Refusal `derived_run`.
    """
    if run.source_id is None:
        return
    if source is None or source.run_id != run.source_id or source.number != number:
        raise Refusal(
            f"{run.name} is derived: a worker publishes what its source {run.source and run.source.name} gets; "
            "publish there.",
            code="derived_run",
        )


def follow_epoch(run: Run, source: Version) -> Epoch:
    """The derived run's epoch with the number of the source version's; begun when it is not there yet."""
    with transaction.atomic():
        Run.objects.select_for_update(of=["self"], no_key=True).get(pk=run.pk)
        current = Epoch.objects.filter(run=run).order_by("-number")[0]
        wanted = source.epoch
        if current.number >= wanted.number:
            return current
        resumed = None
        if wanted.from_version is not None:
            resumed = Version.objects.filter(run=run, number=wanted.from_version.number, state=State.READY).first()
        for number in range(current.number + 1, wanted.number + 1):
            base = resumed if number == wanted.number else None
            Epoch.objects.create(run=run, number=number, reason=wanted.reason, from_version=base)
        return Epoch.objects.select_related("from_version").get(run=run, number=wanted.number)


def variants(run: Run) -> list[Run]:
    """The run's source, or itself, and all that is derived from that; one alone when nothing is."""
    root = run.source or run
    return [root, *Run.objects.filter(source=root).order_by("name")]


def side_by_side(run: Run, count: int) -> list[dict[str, Any]]:
    """The newest versions of the source with each variant's: `{number, cells}`, a cell per run of `variants`."""
    runs = variants(run)
    numbers = list(Version.objects.filter(run=runs[0]).order_by("-number").values_list("number", flat=True)[:count])
    found = Version.objects.filter(run__in=runs, number__in=numbers).select_related("run")
    found = found.defer("envelope", "side_files")
    cells = {(version.run_id, version.number): version for version in found}
    return [{"number": number, "cells": [cells.get((row.pk, number)) for row in runs]} for number in numbers]
