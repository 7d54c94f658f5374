"""The names of a query string. Each call declares the parameters that it takes for the schema; nothing else is taken,
since a filter that is misspelt would otherwise answer with every row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.views import APIView

from controlplane.api.shapes import no_such
from mailboat import __version__
from mailboat.compatibility import newer


def agent(request: Request) -> str:
    """The caller's release, where it is one of ours; else empty."""
    return request.headers.get("User-Agent", "").partition("mailboat/")[2]


def from_newer(request: Request) -> bool:
    """Whether the caller is a release of ours that this one does not know yet: what it says beyond what this one
    understands is passed over, so that islands and trainers outlive a control plane that was taken back to the release
    before (`mailboat.compatibility`).
    """
    return newer(agent(request), __version__)


def check(view: APIView, request: Request) -> None:
    """Raises ValidationError for names that the call does not take."""
    known = declared(view, request)
    unknown = request.query_params.keys() - known
    if unknown and not from_newer(request):
        raise ValidationError(no_such(unknown, "parameter", sorted(known), "this call takes none"))


def declared(view: APIView, request: Request) -> frozenset[str]:
    """The names that a call declares by `extend_schema`."""
    method = "get" if request.method == "HEAD" else str(request.method).lower()
    handler: Any = getattr(view, method, None)
    return frozenset() if handler is None else _names(handler.__func__)


@cache
def _names(handler: Callable[..., Any]) -> frozenset[str]:
    schema = getattr(handler, "kwargs", {}).get("schema")
    if schema is None:
        return frozenset()
    inspector = schema()
    inspector.view = APIView(request=None, kwargs={})
    found = inspector.get_override_parameters()
    return frozenset(
        item.name for item in found if isinstance(item, OpenApiParameter) and item.location == OpenApiParameter.QUERY
    )
