"""Publishers' keys of a run, and the documents by which keys vouch for their successors."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane import head_keys
from controlplane.accounts.principals import FOLLOWERS, OPERATORS
from controlplane.api import answers, paging, repeating
from controlplane.api import key_serializers as shapes
from controlplane.api.repeating import repeatable
from controlplane.api.representations import moment
from controlplane.api.views import ProjectView
from controlplane.registry import beside, keys
from controlplane.registry.models import RunKey
from mailboat.identity import fingerprint


class Keys(ProjectView):
    """The keys of a run."""

    roles = {"GET": FOLLOWERS, "POST": OPERATORS}

    @extend_schema(operation_id="keys_list", parameters=paging.PARAMETERS, responses=answers.page_of(shapes.Key))
    def get(self, request: Request, project: str, run: str) -> Response:
        """Newest first, revoked ones too."""
        page = paging.page(request, keys.of_run(self.run(run)), "-created_at", "-id")
        return page.response([_shown(row) for row in page.rows])

    @extend_schema(
        request=shapes.NewKey, parameters=[repeating.PARAMETER], responses={200: shapes.Key, 201: shapes.Key}
    )
    @repeatable()
    def post(self, request: Request, project: str, run: str) -> Response:
        """Registers a key; from the first one on the run takes signed versions only. Islands that trust the key which
        signed the `endorsement` will trust this one.
        """
        row, new = keys.register(self.run(run), **self.body(request, shapes.NewKey), actor=self.caller.actor)
        return Response(_shown(row), status=201 if new else 200)


class KeyDetail(ProjectView):
    """One key."""

    roles = {"DELETE": OPERATORS}

    @extend_schema(request=shapes.EndKey, responses=shapes.Key)
    def delete(self, request: Request, project: str, run: str, key: uuid.UUID) -> Response:
        """Revokes it for good: commits and islands take its signature no more. Again changes nothing."""
        row = keys.key(self.run(run), key)
        reason = self.body(request, shapes.EndKey)["reason"]
        return Response(_shown(keys.revoke(row, reason, actor=self.caller.actor)))


class Trust(ProjectView):
    """What islands learn keys from."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(responses=shapes.Trust)
    def get(self, request: Request, project: str, run: str) -> Response:
        """The keys of publishers and heads with their endorsements, and the keys that were revoked."""
        row = self.run(run)
        standing = keys.standing(row)
        return Response(
            {
                "publishers": [_endorsed(row.pk, public) for public in standing["publishers"]],
                "revoked": standing["revoked"],
                "heads": [_endorsed(None, public) for public in head_keys.public().values()],
            }
        )


def _endorsed(run: uuid.UUID | None, public_key: str) -> dict[str, Any]:
    envelope = beside.read_key(run, public_key)
    return {"public_key": public_key, "endorsement": None if envelope is None else envelope.to_dict()}


def _shown(row: RunKey) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "kind": row.kind,
        "public_key": row.public_key,
        "fingerprint": fingerprint(row.public_key),
        "name": row.name,
        "created_by": row.created_by,
        "created_at": moment(row.created_at),
        "revoked_at": moment(row.revoked_at),
        "revoked_by": row.revoked_by or None,
        "revoked_reason": row.revoked_reason or None,
    }
