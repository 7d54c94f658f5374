"""Calls of islands, and of operators about islands."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid

from django.conf import settings
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import ISLAND, OPERATORS, READERS
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.views import ProjectView, page_size
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Island
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing

OWN = frozenset({ISLAND})


class EnrolmentTokens(ProjectView):
    """One-time tokens."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=accept.NewEnrolmentToken, responses={201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str) -> Response:
        """A token for one island, shown once."""
        body = self.body(request, accept.NewEnrolmentToken)
        run = registry.run(self.caller.project, body.pop("run"))
        channel = registry.channel(run, body.pop("channel"))
        token, plaintext = services.create_enrolment_token(run, channel, **body, actor=self.caller.actor)
        return Response(
            {
                "id": token.pk,
                "token": plaintext,
                "command": services.enrolment_command(plaintext, project, token.name),
                "expires_at": show.moment(token.expires_at),
            },
            status=201,
        )


class Enrol(ProjectView):
    """The only call without a bearer token: the one-time token is in the body."""

    authentication_classes = ()
    permission_classes = ()

    @extend_schema(request=accept.Enrol, responses={201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str) -> Response:
        """Trades a one-time token for a credential."""
        body = self.body(request, accept.Enrol)
        plaintext, name = body.pop("token"), body.pop("name") or ""
        island, credential = services.enrol(project, plaintext, name=name, **body)
        return Response(
            {
                "island": {"id": str(island.pk), "name": island.name},
                "credential": credential,
                "run": island.run.name,
                "run_id": str(island.run_id),
                "channel": island.channel.name,
                "heartbeat_seconds": settings.MAILBOAT_HEARTBEAT_SECONDS,
            },
            status=201,
        )


class IslandView(ProjectView):
    """A call about one island: an island may make it about itself alone."""

    def island(self, key: uuid.UUID) -> Island:
        """The row. Raises Missing."""
        if self.caller.role == ISLAND and (self.caller.island is None or self.caller.island.pk != key):
            raise Missing("There is no such island in this project.")
        return selectors.island(self.caller.project, key)


class Heartbeat(IslandView):
    """Signs of life."""

    roles = {"POST": OWN}

    @extend_schema(request=accept.Heartbeat, responses=OpenApiTypes.OBJECT)
    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Records what the island says, and answers with commands."""
        row, body = self.island(island), self.body(request, accept.Heartbeat)
        body["digest"], body["reason"] = body["digest"] or "", body["reason"] or ""
        commands = services.heartbeat(row, **body)
        answer = {
            "commands": commands,
            "heartbeat_seconds": settings.MAILBOAT_HEARTBEAT_SECONDS,
            "enabled": row.enabled,
        }
        return Response(answer)


class Syncs(IslandView):
    """Outcomes of syncs."""

    roles = {"GET": READERS | OWN, "POST": OWN}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """The newest reports."""
        reports = selectors.sync_reports(self.island(island), page_size(request))
        return Response({"results": [show.sync_report(report) for report in reports], "next": None})

    @extend_schema(request=accept.Report, responses={201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Records a report; `accepted` says whether the island now counts as at that version."""
        row, body = self.island(island), self.body(request, accept.Report)
        body["digest"], body["error"] = body["digest"] or "", body["error"] or ""
        return Response(show.sync_report(services.report_sync(row, **body)), status=201)


class Challenges(IslandView):
    """Answers to verify challenges."""

    roles = {"POST": OWN}

    @extend_schema(request=accept.Answer, responses=OpenApiTypes.OBJECT)
    def post(self, request: Request, project: str, island: uuid.UUID, challenge: uuid.UUID) -> Response:
        """Takes the answer; the job that asked judges it."""
        row, body = self.island(island), self.body(request, accept.Answer)
        for field in ("digest", "answer", "error"):
            body[field] = body[field] or ""
        answered = services.answer_challenge(row, challenge, **body)
        return Response({"challenge": str(answered.pk), "state": answered.state})


class Islands(ProjectView):
    """The islands of a project."""

    roles = {"GET": READERS}

    @extend_schema(operation_id="islands_list", responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str) -> Response:
        """By name."""
        return Response({"results": [show.island(row) for row in selectors.fleet(self.caller.project)], "next": None})


class IslandDetail(IslandView):
    """One island."""

    roles = {"GET": READERS | OWN}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Its line of the fleet table."""
        return Response(show.island(selectors.row(self.island(island))))


class Fleet(ProjectView):
    """The fleet at a glance."""

    roles = {"GET": READERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str) -> Response:
        """Islands with health, sync status and skew; counts; the head of `latest` of every run."""
        table = selectors.fleet(self.caller.project)
        heads = {channel.run.name: show.channel_head(channel) for channel in registry.heads(self.caller.project)}
        return Response(
            {"islands": [show.island(row) for row in table], "counts": selectors.counts(table), "head": heads}
        )
