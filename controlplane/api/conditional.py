"""Edits that name what they saw: `ETag` on what can be edited, `If-Match` on the edit (RFC 9110).

The tag is the row's revision, which every edit raises: it names the settings, not what happens to the row meanwhile
(a run's newest version, a head's renewed expiry), so that an operator's edit is refused only when another edit was
quicker. The service compares and writes in one conditional UPDATE; nothing is decided here.
"""

from __future__ import annotations

import re

from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.registry.errors import Changed, Refusal

_TAG = re.compile(r'"r([0-9]{1,18})"')

IF_MATCH = OpenApiParameter(
    "If-Match", str, OpenApiParameter.HEADER, description="The `ETag` of what was seen, or `*`."
)
ETAG = OpenApiParameter("ETag", str, OpenApiParameter.HEADER, description="For `If-Match`.", response=True)


def tagged(response: Response, revision: int) -> Response:
    """Puts the revision's tag on an answer."""
    response["ETag"] = f'"r{revision}"'
    return response


def seen_if_said(request: Request) -> int | None:
    """The same for orders, which may be given without having read anything: None also without the header."""
    return seen(request) if "If-Match" in request.headers else None


def seen(request: Request) -> int | None:
    """The revision that an edit goes out from; None for `*`. Raises Refusal `precondition_required` (428) and
    `precondition_failed` (412) for a tag that was never given out.
    """
    header = request.headers.get("If-Match", "").strip()
    if not header:
        raise Refusal(
            "Read it first and send its ETag back as If-Match, so that nobody's edit is overwritten unseen.",
            code="precondition_required",
            status=428,
        )
    if header == "*":
        return None
    match = _TAG.fullmatch(header)
    if match is None:
        raise Changed
    return int(match[1])
