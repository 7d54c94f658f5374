"""Orders of operators to islands. Each answers the island as it stands afterwards, with its ETag; `If-Match` is
honoured where it is sent.
"""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers as drf
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import OPERATORS
from controlplane.api import answers
from controlplane.api import people_serializers as accept
from controlplane.api import representations as show
from controlplane.api.conditional import ETAG, IF_MATCH, seen_if_said, tagged
from controlplane.api.shapes import Nothing
from controlplane.api.views import ProjectView
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Island
from controlplane.jobs import selectors as jobs
from controlplane.jobs import triggers


class Order(ProjectView):
    """One order. Subclasses say what it takes and what it does."""

    roles = {"POST": OPERATORS}
    shape: ClassVar[type[drf.Serializer]] = accept.Reason

    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Gives the order."""
        row, body = selectors.island(self.caller.project, island), self.body(request, self.shape)
        self.give(row, body, actor=self.caller.actor, seen=seen_if_said(request))
        after = selectors.row(selectors.island(self.caller.project, island))
        return tagged(Response(show.island(after)), after.island.revision)

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Calls the service."""
        raise NotImplementedError


def _order(shape: type[drf.Serializer] | None) -> Any:
    return extend_schema(parameters=[IF_MATCH, ETAG], request=shape, responses=answers.IslandLine)


@_order(accept.Approval)
class Approve(Order):
    """Lets a self-enrolled island in, by the fingerprint of its key."""

    shape = accept.Approval

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Compares the fingerprint."""
        services.approve(island, body["fingerprint"], actor=actor, seen=seen)


@_order(accept.Drain)
class Drain(Order):
    """No new requests; what runs has until the deadline."""

    shape = accept.Drain

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Starts it, or sets a new deadline."""
        deadline = timedelta(seconds=body["deadline_seconds"])
        services.drain(island, deadline=deadline, reason=body["reason"], actor=actor, seen=seen)


@_order(None)
class StopDrain(Order):
    """Takes a drain back."""

    shape = Nothing

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Requests are taken again."""
        services.stop_drain(island, actor=actor, seen=seen)


@_order(accept.Reason)
class Enable(Order):
    """Lets an island follow its channel."""

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Switches it on."""
        services.set_enabled(island, True, reason=body["reason"], actor=actor, seen=seen)


@_order(accept.RequiredReason)
class Disable(Order):
    """Stops an island from following its channel; it goes on serving what it holds."""

    shape = accept.RequiredReason

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Switches it off."""
        services.set_enabled(island, False, reason=body["reason"], actor=actor, seen=seen)


@_order(accept.Pin)
class Pin(Order):
    """Holds an island at a version."""

    shape = accept.Pin

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Pins it, or moves its pin."""
        services.pin(island, body["version"], reason=body["reason"], actor=actor, seen=seen)


@_order(None)
class Unpin(Order):
    """Lets an island follow its channel again."""

    shape = Nothing

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """Takes the pin away."""
        services.unpin(island, actor=actor, seen=seen)


@_order(None)
class Rotate(Order):
    """A new credential with the next heartbeat."""

    shape = Nothing

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """The old one works until the new one was used."""
        services.rotate_credential(island, actor=actor, seen=seen)


@_order(accept.Reason)
class Revoke(Order):
    """The end of an island's credentials."""

    def give(self, island: Island, body: dict[str, Any], *, actor: str, seen: int | None) -> None:
        """At once."""
        services.revoke_credential(island, reason=body["reason"], actor=actor, seen=seen)


class Verify(ProjectView):
    """A challenge now."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=None, responses={200: answers.JobInFull, 202: answers.JobInFull})
    def post(self, request: Request, project: str, island: uuid.UUID) -> Response:
        """Starts a verify job (202), or joins the one that is unfinished (200)."""
        self.no_body(request)
        job, new = triggers.verify(self.caller.project, island, actor=self.caller.actor)
        row = jobs.job(self.caller.project, job.pk)
        return Response(show.job(row, jobs.events(row)), status=202 if new else 200)
