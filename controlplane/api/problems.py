"""Problem documents (RFC 9457): how every refusal of the API is worded. The codes stand in docs/api/problems.md."""

# ruff: noqa: ARG001  the signatures are those of Django and DRF

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.defaults import server_error
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from controlplane.registry.errors import Refusal
from mailboat.errors import MailboatError

CONTENT_TYPE = "application/problem+json"
CODES = {
    400: "invalid_request",
    401: "unauthorised",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
    503: "unavailable",
}


def document(status: int, code: str, detail: str, **extra: Any) -> dict[str, Any]:
    """The members of a problem document."""
    title = HTTPStatus(status).phrase
    return {
        **extra,
        "type": f"urn:mailboat:problem:{code}",
        "title": title,
        "status": status,
        "code": code,
        "detail": detail,
    }


def of(  # noqa: PLR0911  one line per kind of error
    error: Exception,
) -> tuple[int, dict[str, Any], dict[str, str]] | None:
    """Status, document and headers for an error that has an answer; None for one that is a fault of ours."""
    match error:
        case Refusal():
            return error.status, document(error.status, error.code, error.detail, **error.extra), error.headers
        case MailboatError():
            return 422, document(422, error.code, str(error)), {}
        case exceptions.ValidationError():
            said, errors = first_sentence(error.detail), error.detail
            return 400, document(400, "invalid_request", said, errors=errors), {}
        case exceptions.APIException():
            status = error.status_code
            headers = {"WWW-Authenticate": 'Bearer realm="mailboat"'} if status == 401 else {}
            return status, document(status, CODES.get(status, "invalid_request"), str(error.detail)), headers
        case Http404():
            return 404, document(404, "not_found", "There is nothing at this address for you."), {}
        case PermissionDenied():
            return 403, document(403, "forbidden", "Your role may not do this."), {}
        case OperationalError() | InterfaceError():
            return 503, document(503, "unavailable", "The database can't be reached; try again."), {"Retry-After": "1"}
    return None


def exception_handler(error: Exception, context: Any) -> Response | None:
    """For DRF's views."""
    answer = of(error)
    if answer is None:
        return None
    if not isinstance(error, DatabaseError):
        set_rollback()
    status, body, headers = answer
    return Response(body, status=status, headers=headers, content_type=CONTENT_TYPE)


def response(error: Exception) -> HttpResponse | None:
    """For views of our own."""
    answer = of(error)
    if answer is None:
        return None
    status, body, headers = answer
    return JsonResponse(body, status=status, headers=headers, content_type=CONTENT_TYPE)


def first_sentence(detail: Any, name: str = "") -> str:
    """The first error of a serialiser as one sentence that names the field."""
    if isinstance(detail, dict):
        key, value = next(iter(detail.items()))
        inner = name if key == "non_field_errors" else f"{name}.{key}" if name else str(key)
        return first_sentence(value, inner)
    if isinstance(detail, list):
        return first_sentence(next((item for item in detail if item), "invalid"), name)
    sentence = str(detail) if str(detail).endswith(".") else f"{detail}."
    return f"{name}: {sentence}" if name else sentence


def fault(request: HttpRequest) -> HttpResponse:
    """What a caller sees of an error of ours: a problem document under /api/, Django's page elsewhere."""
    if not request.path.startswith("/api/"):
        return server_error(request)
    body = document(500, "internal_error", "Something is wrong on the server; its log has the request id.")
    return JsonResponse(body, status=500, content_type=CONTENT_TYPE)


@csrf_exempt  # it changes nothing, whatever is sent
def unknown_address(request: HttpRequest, rest: str = "") -> HttpResponse:
    """Whatever else is asked for under /api/."""
    body = document(404, "not_found", "The API has no such address; /api/schema lists them.")
    return JsonResponse(body, status=404, content_type=CONTENT_TYPE)
