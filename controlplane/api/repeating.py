"""`Idempotency-Key` for creates: a decorator of a view's method."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.authentication import TokenHolder
from controlplane.idempotency import services
from controlplane.idempotency.models import MAX_KEY
from controlplane.idempotency.services import Answer

Method = Callable[..., Response]

HEADER = "Idempotency-Key"
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY}}}")

PARAMETER = OpenApiParameter(
    HEADER,
    {"type": "string", "maxLength": MAX_KEY, "pattern": "^[!-~]+$"},
    OpenApiParameter.HEADER,
    description="Chosen by the caller; the same request under the same key is done once, and answered alike for a day.",
)


def repeatable(*, secret: bool = False) -> Callable[[Method], Method]:
    """The method's answer is kept when the request has a key. With `secret` its body never is."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def wrapped(view: Any, request: Request, **address: Any) -> Response:
            key = request.headers.get(HEADER)
            if key is None:
                return method(view, request, **address)
            if not _KEY.fullmatch(key):
                raise ValidationError({HEADER: f"It must be 1 to {MAX_KEY} visible ASCII characters."})

            def work() -> Answer:
                response = method(view, request, **address)
                return Answer(response.status_code, response.data)

            answer = services.once(
                view.caller.project, _principal(request), key, _fingerprint(request), work, secret=secret
            )
            response = Response(answer.body, status=answer.status)
            if answer.again:
                response["Idempotency-Replayed"] = "true"
            return response

        return wrapped

    return decorate


def _principal(request: Request) -> str:
    """Keys are the caller's own: two tokens never share one."""
    user: Any = request.user
    return f"token:{user.token.pk}" if isinstance(user, TokenHolder) else f"person:{user.pk}"


def _fingerprint(request: Request) -> str:
    body = json.dumps(request.data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{request.method} {request.path} {body}".encode()).hexdigest()
