"""The ordinary calls about runs. A view names the roles that may call it, reads the request and calls one service."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers as drf
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.principals import FOLLOWERS, OPERATORS, PUBLISHERS, Principal
from controlplane.api import answers, conditional, filters, paging, query, repeating
from controlplane.api import representations as show
from controlplane.api import serializers as accept
from controlplane.api.permissions import run_for
from controlplane.api.repeating import repeatable
from controlplane.api.shapes import Nothing
from controlplane.fleet import encoding
from controlplane.registry import deriving, referencing, selectors, services, steering
from controlplane.registry.errors import Missing, Unacceptable
from controlplane.registry.models import Channel, Run


class ProjectView(APIView):
    """A call inside a project. `RolePermission` sets `caller`."""

    roles: ClassVar[dict[str, frozenset[str]]] = {}
    open_to_pending: ClassVar[bool] = False  # whether islands that wait for approval may call it
    open_to_scoped: ClassVar[bool] = False  # whether a token for one run may call it, although it names no run
    caller: Principal

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Who calls, whether they may, and whether the query string is one that the call takes."""
        super().initial(request, *args, **kwargs)
        query.check(self, request)

    def body(self, request: Request, kind: type[drf.Serializer]) -> dict[str, Any]:
        """The checked body. Raises ValidationError."""
        serializer = kind(data=request.data, context={"newer": query.from_newer(request)})
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)

    def no_body(self, request: Request) -> None:
        """Refuses a body with anything in it. Raises ValidationError."""
        self.body(request, Nothing)

    def run(self, name: str) -> Run:
        """A run that the caller may see. Raises Missing."""
        return run_for(self.caller, name)


class Runs(ProjectView):
    """The runs of a project."""

    roles = {"GET": FOLLOWERS, "POST": PUBLISHERS | OPERATORS}
    open_to_scoped = True

    @extend_schema(
        operation_id="runs_list", parameters=filters.parameters(filters.Runs), responses=answers.page_of(answers.Run)
    )
    def get(self, request: Request, project: str) -> Response:
        """The runs that the caller may see, newest first."""
        found = filters.filtered(request, filters.Runs, selectors.runs(self.caller.project))
        if self.caller.island is not None:
            found = found.filter(pk=self.caller.island.run_id)
        elif self.caller.run is not None:
            found = found.filter(pk=self.caller.run.pk)
        page = paging.page(request, found, "-created_at", "-id")
        epochs, ready = selectors.standing(page.rows)
        return page.response([show.run(run, epochs[run.pk], ready.get(run.pk)) for run in page.rows])

    @extend_schema(request=accept.NewRun, parameters=[repeating.PARAMETER], responses={201: answers.Run})
    @repeatable()
    def post(self, request: Request, project: str) -> Response:
        """A new run; with `source` and `format` one that a worker publishes, in another format."""
        if self.caller.run is not None:
            raise PermissionDenied(f"This token is for run {self.caller.run.name} alone.")
        body, project_row, actor = self.body(request, accept.NewRun), self.caller.project, self.caller.actor
        if "source" in body:
            run = deriving.create(project_row, body["name"], body["source"], body["format"], actor=actor)
        else:
            run = services.create_run(project_row, **body, actor=actor)
        return Response(show.run(run, selectors.current_epoch(run), None), status=201)


class RunDetail(ProjectView):
    """One run."""

    roles = {"GET": FOLLOWERS, "PATCH": OPERATORS}

    @extend_schema(parameters=[conditional.ETAG], responses=answers.RunInFull)
    def get(self, request: Request, project: str, run: str) -> Response:
        """Its settings, epoch and newest ready version. The ETag names the settings."""
        return self._shown(self.run(run))

    @extend_schema(request=accept.EditRun, parameters=[conditional.IF_MATCH], responses=answers.RunInFull)
    def patch(self, request: Request, project: str, run: str) -> Response:
        """Changes settings that nobody else has changed since they were read."""
        row, body = self.run(run), self.body(request, accept.EditRun)
        return self._shown(steering.edit_run(row, body, seen=conditional.seen(request), actor=self.caller.actor))

    def _shown(self, row: Run) -> Response:
        shown = show.run(row, selectors.current_epoch(row), selectors.latest_ready(row))
        return conditional.tagged(Response(shown | {"encode_next": encoding.wanted(row)}), row.revision)


class Epochs(ProjectView):
    """The epochs of a run."""

    roles = {"GET": FOLLOWERS, "POST": PUBLISHERS | OPERATORS}

    @extend_schema(operation_id="epochs_list", parameters=paging.PARAMETERS, responses=answers.page_of(answers.Epoch))
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first."""
        page = paging.page(request, selectors.epochs(self.run(run)), "-number")
        return page.response([show.epoch(row) for row in page.rows])

    @extend_schema(request=accept.NewEpoch, parameters=[repeating.PARAMETER], responses={201: answers.Epoch})
    @repeatable()
    def post(self, request: Request, project: str, run: str) -> Response:
        """A new epoch that goes on from a ready version, from the state with a digest, or from fresh bytes."""
        body = self.body(request, accept.NewEpoch)
        actor, state = self.caller.actor, body["from_state"] or ""
        epoch = services.begin_epoch(self.run(run), body["from_version"], body["reason"], from_state=state, actor=actor)
        return Response(show.epoch(epoch), status=201)


class Channels(ProjectView):
    """The channels of a run."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(
        operation_id="channels_list", parameters=paging.PARAMETERS, responses=answers.page_of(answers.Channel)
    )
    def get(self, request: Request, project: str, run: str) -> Response:
        """By name."""
        page = paging.page(request, selectors.channels(self.run(run)), "name")
        return page.response([show.channel_head(row) for row in page.rows])


class ChannelDetail(ProjectView):
    """One channel."""

    roles = {"GET": FOLLOWERS, "PUT": OPERATORS}

    @extend_schema(parameters=[conditional.ETAG], responses=answers.Channel)
    def get(self, request: Request, project: str, run: str, channel: str) -> Response:
        """Where it points. The ETag names the move that took it there and the protection."""
        return self._shown(selectors.channel(self.run(run), channel))

    @extend_schema(
        request=accept.EditChannel,
        parameters=[
            conditional.IF_MATCH,
            OpenApiParameter("If-None-Match", {"type": "string", "enum": ["*"]}, OpenApiParameter.HEADER),
        ],
        responses={200: answers.Channel, 201: answers.Channel},
    )
    def put(self, request: Request, project: str, run: str, channel: str) -> Response:
        """Moves, protects or (with `If-None-Match: *`) makes a channel. Going back needs a reason: islands follow, as
        the serial rises. A channel that should stay there must be protected, or the next ready version moves `latest`.
        """
        row, body, actor = self.run(run), self.body(request, accept.EditChannel), self.caller.actor
        if channel.startswith(Channel.PINS) or len(channel) > 40:
            raise Unacceptable(
                f"A channel's name has at most 40 characters and does not begin with {Channel.PINS}.",
                code="name_reserved",
            )
        if request.headers.get("If-None-Match", "").strip() == "*":
            return self._shown(steering.create_channel(row, channel, **{"protected": False} | body, actor=actor), 201)
        try:
            found = selectors.channel(row, channel)
        except Missing as error:
            raise Missing(f"{error.detail} Send `If-None-Match: *` to make it.") from error
        said = {"protected": None} | body
        return self._shown(steering.edit_channel(found, **said, seen=conditional.seen(request), actor=actor))

    def _shown(self, row: Channel, status: int = 200) -> Response:
        return conditional.tagged(Response(show.channel_head(row), status=status), row.revision)


class Blobs(ProjectView):
    """Announcing blobs."""

    roles = {"POST": PUBLISHERS}

    @extend_schema(request=accept.NewBlob, responses={200: answers.BlobStanding, 201: answers.BlobStanding})
    def post(self, request: Request, project: str, run: str) -> Response:
        """Whether the run has the blob; if not, the upload to feed and where it stands.

        With `direct`, where the blob store takes parts: their addresses, for those that are missing.
        """
        body = self.body(request, accept.NewBlob)
        upload = services.begin_upload(self.run(run), body["sha256"], body["size"])
        if upload is None:
            return Response({"exists": True})
        standing: dict[str, Any] = {"exists": False, "upload": str(upload.pk), "offset": upload.offset}
        parts = services.missing_parts(upload) if body["direct"] else None
        if parts is not None:
            standing["parts"] = [show.part(part) for part in parts]
        return Response(standing, status=201)


class CompleteUpload(ProjectView):
    """The end of an upload whose parts went straight to the blob store."""

    roles = {"POST": PUBLISHERS}

    @extend_schema(request=None, responses={200: answers.BlobStanding, 202: answers.BlobStanding})
    def post(self, request: Request, project: str, run: str, upload: uuid.UUID) -> Response:
        """Joins the parts and checks the digest. 202: a large one is at it, ask again. 409 `parts_missing` names those
        that are not there; 422 `digest_mismatch` is said once.
        """
        self.no_body(request)
        row = selectors.upload(self.run(run), upload)
        if services.finish_parts(row):
            return Response({"exists": True})
        standing = {"exists": False, "upload": str(row.pk), "joining": True}
        return Response(standing, status=202, headers={"Retry-After": "1"})


class Versions(ProjectView):
    """The versions of a run."""

    roles = {"GET": FOLLOWERS, "POST": PUBLISHERS}

    @extend_schema(
        operation_id="versions_list",
        parameters=filters.parameters(filters.Versions),
        responses=answers.page_of(answers.VersionInShort),
    )
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first."""
        found = filters.filtered(request, filters.Versions, selectors.versions_in_short(self.run(run)))
        page = paging.page(request, found, "-number")
        rows: list[Any] = list(page.rows)  # `anchored` is an annotation
        return page.response([show.version_in_short(row, anchored=row.anchored) for row in rows])

    @extend_schema(
        request=accept.NewVersion,
        parameters=[repeating.PARAMETER],
        responses={200: answers.Version, 202: answers.Version},
    )
    @repeatable()
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

    @extend_schema(responses=answers.Version)
    def get(self, request: Request, project: str, run: str, number: int) -> Response:
        """State, lineage, digests, sizes and files."""
        return Response(show.version(selectors.version(self.run(run), number)))


class VersionAnchor(ProjectView):
    """The full checkpoint of a version."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=accept.NewAnchor, responses={200: answers.Version, 201: answers.Version})
    def post(self, request: Request, project: str, run: str, number: int) -> Response:
        """Says where the checkpoint of a ready version lies: a folder that islands can read, or a public address. They
        prove it before they use it. The same again changes nothing.
        """
        row, body = self.run(run), self.body(request, accept.NewAnchor)
        _, new = referencing.register(row, number, body["uri"], body["files"], actor=self.caller.actor)
        return Response(show.version(selectors.version(row, number)), status=201 if new else 200)


class Manifest(ProjectView):
    """The manifest of a version."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=answers.Envelope)
    def get(self, request: Request, project: str, run: str, number: int) -> Response:
        """The envelope as it was committed."""
        version = selectors.version(self.run(run), number)
        if version.envelope is None:
            raise Missing(f"Version {number} has no manifest yet.")
        return Response(version.envelope)
