"""JSON bodies, bounded before they are parsed and refused when PostgreSQL could not store them."""

# ruff: noqa: ARG002  the signature is that of DRF

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from django.conf import settings
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import BaseParser


class TooLarge(APIException):
    """The body is longer than any sensible request."""

    status_code = 413


class BoundedJSONParser(BaseParser):
    """Strict JSON of at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes."""

    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """The value of the body. Raises TooLarge, ParseError."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise TooLarge(f"The body is longer than {limit} bytes.")
        try:
            text = raw.decode("utf-8")
            value = json.loads(text, parse_constant=_refuse)
            if "\\u" in text:  # escapes may hide what PostgreSQL can't store: zero bytes and half characters
                json.dumps(value, ensure_ascii=False).encode("utf-8")
                if "\\u0000" in text:
                    raise ValueError("it holds a zero character")
        except (ValueError, RecursionError) as error:
            raise ParseError(f"The body is not valid JSON: {str(error)[:200]}.") from error
        return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
