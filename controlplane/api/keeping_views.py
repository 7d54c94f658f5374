"""Calls about what a run keeps and who can serve it: leases, the preview of a collection, breaches, resolve."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

from datetime import timedelta
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers as drf
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import OPERATORS, PUBLISHERS, READERS
from controlplane.api import answers, paging
from controlplane.api.representations import moment
from controlplane.api.shapes import Body, Text, Whole
from controlplane.api.views import ProjectView
from controlplane.fleet import resolving, staleness
from controlplane.fleet.models import Breach
from controlplane.registry import leases, retention, selectors
from controlplane.registry.models import VersionLease

FOUR_WEEKS = 4 * 7 * 24 * 3600


class NewLease(Body):
    """POST leases."""

    version = Whole()
    seconds = Whole(min_value=1, max_value=FOUR_WEEKS)
    reason = Text(max_length=300, allow_blank=True, default="")


class Lease(drf.Serializer):
    """Who needs a version, and until when."""

    id = drf.IntegerField()
    version = drf.IntegerField()
    holder = drf.CharField()
    reason = drf.CharField(allow_blank=True)
    created_at = drf.DateTimeField()
    expires_at = drf.DateTimeField()


class Preview(drf.Serializer):
    """What a collection would do now."""

    retire = drf.ListField(child=drf.IntegerField())
    keep = drf.IntegerField()
    patches = drf.IntegerField()
    anchors = drf.IntegerField()
    blobs = drf.IntegerField()
    bytes = drf.IntegerField()
    anchor = drf.IntegerField(allow_null=True)
    reasons = drf.DictField(child=drf.IntegerField(), help_text="How many versions stay for which reason.")


class BreachLine(drf.Serializer):
    """A breach of the staleness budget."""

    island = drf.CharField()
    kind = drf.ChoiceField(Breach.Kind.choices)
    limit = drf.IntegerField()
    worst = drf.IntegerField()
    began_at = drf.DateTimeField()
    ended_at = drf.DateTimeField(allow_null=True)


class Server(drf.Serializer):
    """An island that can serve what was asked for."""

    id = drf.UUIDField()
    name = drf.CharField()
    provider = drf.CharField(allow_blank=True)
    region = drf.CharField(allow_blank=True)
    hostname = drf.CharField(allow_blank=True)
    engine = drf.CharField(allow_blank=True)
    version = drf.IntegerField()
    active_requests = drf.IntegerField(allow_null=True)


class Resolved(drf.Serializer):
    """Islands that hold a version or a later one, the freshest and least busy first."""

    run = drf.CharField()
    min_version = drf.IntegerField()
    islands = Server(many=True)


class Leases(ProjectView):
    """Leases of a run's versions."""

    roles = {"GET": READERS, "POST": PUBLISHERS | OPERATORS}

    @extend_schema(operation_id="leases_list", parameters=paging.PARAMETERS, responses=answers.page_of(Lease))
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first."""
        page = paging.page(request, leases.of_run(self.run(run)), "-id")
        return page.response([_lease(row) for row in page.rows])

    @extend_schema(request=NewLease, responses={201: Lease})
    def post(self, request: Request, project: str, run: str) -> Response:
        """Keeps a ready version, and a way to it, for so many seconds; again prolongs it. 409 `not_ready`."""
        found = self.run(run)
        body = self.body(request, NewLease)
        version = leases.leasable(found, body["version"])
        lifetime = timedelta(seconds=body["seconds"])
        return Response(_lease(leases.take(version, self.caller.actor, lifetime, body["reason"])), status=201)


class LeaseDetail(ProjectView):
    """One lease."""

    roles = {"DELETE": PUBLISHERS | OPERATORS}

    @extend_schema(responses={204: None})
    def delete(self, request: Request, project: str, run: str, lease: int) -> Response:
        """Ends it; publishers may end their own."""
        holder = None if self.caller.role in OPERATORS else self.caller.actor
        leases.end(self.run(run), lease, holder)
        return Response(status=204)


class RetentionPreview(ProjectView):
    """What a collection would remove."""

    roles = {"GET": READERS}

    @extend_schema(responses=Preview)
    def get(self, request: Request, project: str, run: str) -> Response:
        """Versions that would be retired, and the bytes that come back. Nothing is removed here."""
        shown = retention.preview(self.run(run))
        return Response(
            {
                "retire": list(shown.numbers),
                "keep": shown.kept,
                "patches": len(shown.patches),
                "anchors": len(shown.anchors),
                "blobs": len(shown.blobs),
                "bytes": shown.bytes,
                "anchor": shown.anchor,
                "reasons": shown.reasons,
            }
        )


class Breaches(ProjectView):
    """Breaches of a run's staleness budget."""

    roles = {"GET": READERS}

    @extend_schema(operation_id="breaches_list", parameters=paging.PARAMETERS, responses=answers.page_of(BreachLine))
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first."""
        page = paging.page(request, staleness.breaches(self.run(run)), "-id")
        return page.response([_breach(row) for row in page.rows])


class Resolve(ProjectView):
    """Who can serve a version now."""

    roles = {"GET": READERS}

    @extend_schema(
        parameters=[
            OpenApiParameter("run", {"type": "string"}, required=True),
            OpenApiParameter("min_version", {"type": "integer", "minimum": 0, "maximum": paging.BIG}, required=True),
        ],
        responses=Resolved,
    )
    def get(self, request: Request, project: str) -> Response:
        """Islands of `run` that are there, take requests and have proven to hold `min_version` or a later one."""
        least = paging.number(request, "min_version", None)
        name = request.query_params.get("run", "")
        if least is None or not name:
            raise ValidationError({"run, min_version": "Both are needed."})
        run = selectors.run(self.caller.project, name)
        found = [_server(row) for row in resolving.serving(run, least)]
        return Response({"run": run.name, "min_version": least, "islands": found})


def _lease(row: VersionLease) -> dict[str, Any]:
    return {
        "id": row.pk,
        "version": row.version.number,
        "holder": row.holder,
        "reason": row.reason,
        "created_at": moment(row.created_at),
        "expires_at": moment(row.expires_at),
    }


def _breach(row: Breach) -> dict[str, Any]:
    return {
        "island": row.island.name,
        "kind": row.kind,
        "limit": row.limit,
        "worst": row.worst,
        "began_at": moment(row.began_at),
        "ended_at": moment(row.ended_at),
    }


def _server(row: resolving.Standing) -> dict[str, Any]:
    island = row.island
    return {
        "id": str(island.id),
        "name": island.name,
        "provider": island.provider,
        "region": island.region,
        "hostname": island.hostname,
        "engine": island.engine,
        "version": row.version,
        "active_requests": island.active_requests,
    }
