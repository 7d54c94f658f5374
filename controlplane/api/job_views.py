"""Calls about background work."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import OPERATORS, READERS
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.views import ProjectView, page_size
from controlplane.jobs import selectors, services, triggers
from controlplane.jobs.models import Job

STATES = [*Job.State.values, "unfinished"]


class Jobs(ProjectView):
    """The jobs of a project."""

    roles = {"GET": READERS, "POST": OPERATORS}

    @extend_schema(operation_id="jobs_list", responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str) -> Response:
        """Newest first."""
        state, kind = _choice(request, "state", STATES), _choice(request, "kind", Job.Kind.values)
        found = selectors.jobs(self.caller.project, state=state, kind=kind)[: page_size(request)]
        return Response({"results": [show.job(row) for row in found], "next": None})

    @extend_schema(request=accept.NewJob, responses={200: OpenApiTypes.OBJECT, 202: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str) -> Response:
        """Starts a replay or a verification; a second trigger joins the unfinished job (200)."""
        body, caller = self.body(request, accept.NewJob), self.caller
        if body["kind"] == Job.Kind.REPLAY:
            job, new = triggers.replay(caller.project, body["run"], body["version"], actor=caller.actor)
        else:
            job, new = triggers.verify(caller.project, body["island"], actor=caller.actor)
        row = selectors.job(caller.project, job.pk)
        return Response(show.job(row, selectors.events(row)), status=202 if new else 200)


class JobDetail(ProjectView):
    """One job."""

    roles = {"GET": READERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """State, progress, result and log."""
        row = selectors.job(self.caller.project, job)
        return Response(show.job(row, selectors.events(row)))


class CancelJob(ProjectView):
    """Stopping a job."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=None, responses={202: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """Asks to stop; 409 when it has ended."""
        row = services.cancel(selectors.job(self.caller.project, job), self.caller.actor)
        return Response(show.job(row), status=202)


def _choice(request: Request, name: str, choices: Any) -> str:
    value = request.query_params.get(name, "")
    if value and value not in choices:
        raise ValidationError({name: f"It must be one of {', '.join(choices)}."})
    return str(value)
