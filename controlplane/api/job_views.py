"""Calls about background work."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import OPERATORS, READERS
from controlplane.api import answers, filters, paging, repeating
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.repeating import repeatable
from controlplane.api.views import ProjectView
from controlplane.jobs import selectors, services, triggers
from controlplane.jobs.models import Job
from controlplane.registry import selectors as registry
from controlplane.registry.models import Run


class Jobs(ProjectView):
    """The jobs of a project."""

    roles = {"GET": READERS, "POST": OPERATORS}

    @extend_schema(
        operation_id="jobs_list",
        parameters=filters.parameters(filters.Jobs),
        responses=answers.page_of(answers.JobInShort),
    )
    def get(self, request: Request, project: str) -> Response:
        """Newest first."""
        found = filters.filtered(request, filters.Jobs, selectors.jobs(self.caller.project))
        page = paging.page(request, found, "-queued_at", "-id")
        return page.response([show.job(row) for row in page.rows])

    @extend_schema(
        request=accept.NewJob,
        parameters=[repeating.PARAMETER],
        responses={200: answers.JobInFull, 202: answers.JobInFull},
    )
    @repeatable()
    def post(self, request: Request, project: str) -> Response:
        """Starts a job of one of the kinds; a second trigger joins the unfinished one (200)."""
        body, caller = self.body(request, accept.NewJob), self.caller
        run = registry.run(caller.project, body["run"]) if "run" in body else None
        match body["kind"], run:
            case Job.Kind.REPLAY, Run():
                job, new = triggers.replay(caller.project, run.name, body["version"], actor=caller.actor)
            case Job.Kind.MERGE, Run():
                job, new = triggers.merge(run, body["from"], body["to"], actor=caller.actor)
            case Job.Kind.ANCHOR, Run():
                job, new = triggers.anchor(run, body["version"], actor=caller.actor)
            case Job.Kind.COLLECT, Run():
                job, new = triggers.collect(run, actor=caller.actor)
            case _:
                job, new = triggers.verify(caller.project, body["island"], actor=caller.actor)
        row = selectors.job(caller.project, job.pk)
        return Response(show.job(row, selectors.events(row)), status=202 if new else 200)


class JobDetail(ProjectView):
    """One job."""

    roles = {"GET": READERS}

    @extend_schema(responses=answers.JobInFull)
    def get(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """State, progress, result and log."""
        row = selectors.job(self.caller.project, job)
        return Response(show.job(row, selectors.events(row)))


class CancelJob(ProjectView):
    """Stopping a job."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=None, responses={202: answers.JobInShort})
    def post(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """Asks to stop; 409 when it has ended."""
        self.no_body(request)
        row = services.cancel(selectors.job(self.caller.project, job), self.caller.actor)
        return Response(show.job(row), status=202)
