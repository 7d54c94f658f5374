"""The ordinary calls of the API. A view names the roles that may call it, reads the request and calls one service."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers as drf
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.principals import FOLLOWERS, OPERATORS, PUBLISHERS, Principal
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.permissions import run_for
from controlplane.registry import selectors, services
from controlplane.registry.errors import Missing
from controlplane.registry.models import Run, Version

PAGE = 100
MAX_PAGE = 1000
BIG = (1 << 63) - 1


class ProjectView(APIView):
    """A call inside a project. `RolePermission` sets `caller`."""

    roles: ClassVar[dict[str, frozenset[str]]] = {}
    caller: Principal

    def body(self, request: Request, kind: type[drf.Serializer]) -> dict[str, Any]:
        """The checked body. Raises ValidationError."""
        serializer = kind(data=request.data)
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)

    def run(self, name: str) -> Run:
        """A run that the caller may see. Raises Missing."""
        return run_for(self.caller, name)


def number(request: Request, name: str, default: int | None, *, high: int = BIG) -> int | None:
    """A whole number of the query string. Raises ValidationError."""
    raw = request.query_params.get(name, "")
    if not raw:
        return default
    if not raw.isascii() or not raw.isdecimal() or len(raw) > 19 or int(raw) > high:
        raise ValidationError({name: f"It must be a whole number from 0 to {high}."})
    return int(raw)


def page_size(request: Request) -> int:
    """`limit` of the query string."""
    return number(request, "limit", PAGE, high=MAX_PAGE) or PAGE


class Runs(ProjectView):
    """The runs of a project."""

    roles = {"GET": FOLLOWERS, "POST": PUBLISHERS | OPERATORS}

    @extend_schema(operation_id="runs_list", responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str) -> Response:
        """Every run that the caller may see, newest first."""
        found = [run for run in selectors.runs(self.caller.project) if self.caller.may_see_run(run)]
        epochs, ready = selectors.standing(found)
        return Response({"results": [show.run(run, epochs[run.pk], ready.get(run.pk)) for run in found], "next": None})

    @extend_schema(request=accept.NewRun, responses={201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str) -> Response:
        """A new run."""
        run = services.create_run(self.caller.project, **self.body(request, accept.NewRun), actor=self.caller.actor)
        return Response(show.run(run, selectors.current_epoch(run), None), status=201)


class RunDetail(ProjectView):
    """One run."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, run: str) -> Response:
        """Its settings, epoch and newest ready version."""
        row = self.run(run)
        return Response(show.run(row, selectors.current_epoch(row), selectors.latest_ready(row)))


class Epochs(ProjectView):
    """The epochs of a run."""

    roles = {"POST": PUBLISHERS | OPERATORS}

    @extend_schema(request=accept.NewEpoch, responses={201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str, run: str) -> Response:
        """A new epoch from a ready version."""
        body = self.body(request, accept.NewEpoch)
        epoch = services.begin_epoch(self.run(run), body["from_version"], body["reason"], actor=self.caller.actor)
        return Response(
            {"number": epoch.number, "from_version": body["from_version"], "reason": epoch.reason}, status=201
        )


class Blobs(ProjectView):
    """Announcing blobs."""

    roles = {"POST": PUBLISHERS}

    @extend_schema(request=accept.NewBlob, responses={200: OpenApiTypes.OBJECT, 201: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str, run: str) -> Response:
        """Whether the run has the blob; if not, the upload to feed and where it stands."""
        body = self.body(request, accept.NewBlob)
        upload = services.begin_upload(self.run(run), body["sha256"], body["size"])
        if upload is None:
            return Response({"exists": True})
        return Response({"exists": False, "upload": str(upload.pk), "offset": upload.offset}, status=201)


class Versions(ProjectView):
    """The versions of a run."""

    roles = {"GET": FOLLOWERS, "POST": PUBLISHERS}

    @extend_schema(operation_id="versions_list", responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first; `before` continues."""
        state = request.query_params.get("state", "")
        if state and state not in Version.State.values:
            raise ValidationError({"state": f"It must be one of {', '.join(Version.State.values)}."})
        limit = page_size(request)
        found = list(
            selectors.versions(self.run(run), state=state, before=number(request, "before", None))[: limit + 1]
        )
        following = found[limit - 1].number if len(found) > limit else None
        return Response({"results": [show.version(row) for row in found[:limit]], "next": following})

    @extend_schema(request=accept.NewVersion, responses={200: OpenApiTypes.OBJECT, 202: OpenApiTypes.OBJECT})
    def post(self, request: Request, project: str, run: str) -> Response:
        """Commits a version; the same content again changes nothing."""
        body, row, actor = self.body(request, accept.NewVersion), self.run(run), self.caller.actor
        if "envelope" in body:
            version, new = services.commit_manifest(row, body["envelope"], body["anchor"], actor=actor)
        else:
            version, new = services.commit_checkpoint(
                row, body["checkpoint"], body["number"], body["parent"], body["epoch"], step=body["step"], actor=actor
            )
        return Response(show.version(selectors.version(row, version.number)), status=202 if new else 200)


class VersionDetail(ProjectView):
    """One version."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, run: str, number: int) -> Response:
        """State, lineage, digests and sizes."""
        return Response(show.version(selectors.version(self.run(run), number)))


class Manifest(ProjectView):
    """The manifest of a version."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, run: str, number: int) -> Response:
        """The envelope as it was committed."""
        version = selectors.version(self.run(run), number)
        if version.envelope is None:
            raise Missing(f"Version {number} has no manifest yet.")
        return Response(version.envelope)


class Plan(ProjectView):
    """Routes."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, project: str, run: str) -> Response:
        """The route from `from_digest` (empty: nothing is held) to version `to`."""
        held = request.query_params.get("from_digest", "")
        if held and not (len(held) == 64 and set(held) <= set("0123456789abcdef")):
            raise ValidationError({"from_digest": "It must be 64 hex digits."})
        return Response(selectors.plan(self.run(run), held, number(request, "to", None)).as_json())
