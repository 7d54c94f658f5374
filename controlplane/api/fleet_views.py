"""Calls of islands, and of operators about islands."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import head_keys
from controlplane.accounts import limits
from controlplane.accounts.principals import ISLAND, OPERATORS, PEOPLE, READERS
from controlplane.api import answers, conditional, filters, paging, people_answers, query, repeating
from controlplane.api import people_representations as people
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.repeating import repeatable
from controlplane.api.views import ProjectView
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Island
from controlplane.registry import clock, keys
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing
from controlplane.registry.models import Run

OWN = frozenset({ISLAND})


def _keys(run: Run) -> dict[str, Any]:
    """What an island pins when it meets keys for the first time, and which keys count no more."""
    return {**keys.standing(run), "heads": list(head_keys.public().values())}


class EnrolmentTokens(ProjectView):
    """One-time tokens and self-enrolment keys."""

    roles = {"GET": PEOPLE, "POST": OPERATORS}

    @extend_schema(
        operation_id="enrolment_tokens_list",
        parameters=paging.PARAMETERS,
        responses=answers.page_of(people_answers.EnrolmentKey),
    )
    def get(self, request: Request, project: str) -> Response:
        """Newest first, without their secrets."""
        page, now = paging.page(request, selectors.enrolment_tokens(self.caller.project), "-id"), clock.now()
        return page.response([people.enrolment_token(row, now) for row in page.rows])

    @extend_schema(
        request=accept.NewEnrolmentToken, parameters=[repeating.PARAMETER], responses={201: answers.EnrolmentToken}
    )
    @repeatable(secret=True)
    def post(self, request: Request, project: str) -> Response:
        """A token for one island, or with `reusable` a key for any number that then wait for approval; shown once."""
        body = self.body(request, accept.NewEnrolmentToken)
        days = body.pop("days")
        body["lifetime"] = None if days is None else timedelta(days=days)
        run = registry.run(self.caller.project, body.pop("run"))
        channel = registry.channel(run, body.pop("channel"))
        token, plaintext = services.create_enrolment_token(run, channel, **body, actor=self.caller.actor)
        return Response(
            {
                "id": token.pk,
                "token": plaintext,
                "command": services.enrolment_command(token, plaintext),
                "expires_at": show.moment(token.expires_at),
            },
            status=201,
        )


class RevokeEnrolmentToken(ProjectView):
    """The end of an enrolment token."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=None, responses=people_answers.EnrolmentKey)
    def post(self, request: Request, project: str, token: int) -> Response:
        """At once; islands that it has enrolled stay. Again changes nothing."""
        self.no_body(request)
        row = selectors.enrolment_token(self.caller.project, token)
        services.revoke_enrolment_token(row, actor=self.caller.actor)
        return Response(people.enrolment_token(row, clock.now()))


class Enrol(ProjectView):
    """The only call without a bearer token: the enrolment token is in the body."""

    authentication_classes = ()
    permission_classes = ()

    @extend_schema(request=accept.Enrol, auth=[], responses={201: answers.Enrolment})
    def post(self, request: Request, project: str) -> Response:
        """Trades an enrolment token for a credential."""
        limits.take(limits.ENROL_BY_ADDRESS, request.META.get("REMOTE_ADDR", ""))
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
                "pending": island.pending,
                "keys": _keys(island.run),
            },
            status=201,
        )


class IslandView(ProjectView):
    """A call about one island: an island may make it about itself alone."""

    def island(self, key: uuid.UUID) -> Island:
        """The row. Raises Missing."""
        if self.caller.role != ISLAND:
            return selectors.island(self.caller.project, key)
        if self.caller.island is None or self.caller.island.pk != key:
            raise Missing("There is no such island in this project.")
        return self.caller.island


class Heartbeat(IslandView):
    """Signs of life."""

    roles = {"POST": OWN}

    @extend_schema(request=accept.Heartbeat, responses=answers.Commands)
    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Records what the island says, and answers with commands."""
        row, body = self.island(island), self.body(request, accept.Heartbeat)
        holder: Any = request.user  # a TokenHolder: only islands come here
        body["digest"], body["reason"] = body["digest"] or "", body["reason"] or ""
        commands, unreported = services.heartbeat(row, **body, agent_version=query.agent(request))
        answer = {
            "commands": commands,
            "heartbeat_seconds": settings.MAILBOAT_HEARTBEAT_SECONDS,
            "enabled": row.enabled,
            "keys": _keys(row.run),
            "unreported": unreported,
            **services.standing(row, holder.token),
        }
        return Response(answer)


class Syncs(IslandView):
    """Outcomes of syncs."""

    roles = {"GET": READERS | OWN, "POST": OWN}

    @extend_schema(operation_id="syncs_list", parameters=paging.PARAMETERS, responses=answers.page_of(answers.Sync))
    def get(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """The newest reports."""
        page = paging.page(request, self.island(island).sync_reports.all(), "-id")
        return page.response([show.sync_report(report) for report in page.rows])

    @extend_schema(request=accept.Report, responses={201: answers.Sync})
    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Records a report; `accepted` says whether the island now counts as at that version."""
        row, body = self.island(island), self.body(request, accept.Report)
        body["digest"], body["error"] = body["digest"] or "", body["error"] or ""
        return Response(show.sync_report(services.report_sync(row, **body)), status=201)


class Challenges(IslandView):
    """Answers to verify challenges."""

    roles = {"POST": OWN}

    @extend_schema(request=accept.Answer, responses=answers.Challenge)
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

    @extend_schema(
        operation_id="islands_list",
        parameters=filters.parameters(filters.Islands),
        responses=answers.page_of(answers.IslandLine),
    )
    def get(self, request: Request, project: str) -> Response:
        """By name."""
        found = filters.filtered(request, filters.Islands, selectors.islands(self.caller.project))
        page = paging.page(request, found, "name")
        return page.response([show.island(row) for row in selectors.rows(page.rows)])


class IslandDetail(IslandView):
    """One island."""

    roles = {"GET": READERS | OWN, "DELETE": OPERATORS}
    open_to_pending = True

    @extend_schema(parameters=[conditional.ETAG], responses=answers.IslandLine)
    def get(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Its line of the fleet table. The ETag names what operators asked of it."""
        row = self.island(island)
        return conditional.tagged(Response(show.island(selectors.row(row))), row.revision)

    @extend_schema(parameters=[conditional.IF_MATCH], responses={204: None})
    def delete(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Forgets an island whose credential was revoked, or whose approval is refused; 409 `wrong_state` else."""
        services.remove(self.island(island), actor=self.caller.actor, seen=conditional.seen_if_said(request))
        return Response(status=204)


class Fleet(ProjectView):
    """The fleet at a glance."""

    roles = {"GET": READERS}

    @extend_schema(responses=answers.Fleet)
    def get(self, request: Request, project: str) -> Response:
        """Islands with health, sync status and skew; counts; the head of `latest` of every run."""
        table = selectors.fleet(self.caller.project)
        heads = {channel.run.name: show.channel_head(channel) for channel in registry.heads(self.caller.project)}
        return Response(
            {"islands": [show.island(row) for row in table], "counts": selectors.counts(table), "head": heads}
        )
