"""JSON bodies, bounded before they are parsed and refused when PostgreSQL could not store them."""

# ruff: noqa: ARG002  the signature is that of DRF

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from django.conf import settings
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import BaseParser

DIGITS = 40  # more than any number here can have
LONGEST_REAL = 400


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
            value = json.loads(
                text, parse_constant=_refuse, parse_int=_whole, parse_float=_real, object_pairs_hook=_object
            )
            if "\\u" in text:  # escapes may hide what PostgreSQL can't store: zero bytes and half characters
                json.dumps(value, ensure_ascii=False).encode("utf-8")
                if "\\u0000" in text:
                    raise _Unfit("it holds a zero character")
        except _Unfit as error:
            raise ParseError(f"The body can't be taken: {error}.") from error
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise ParseError(f"The body is not valid JSON: it goes wrong at {where}.") from error
        except UnicodeError as error:
            raise ParseError("The body is not valid Unicode.") from error
        except RecursionError as error:
            raise ParseError("The body is nested too deeply.") from error
        return value


class _Unfit(ValueError):  # noqa: N818  never leaves this module
    """JSON that means nothing here; the text says why, in our words."""


def _refuse(constant: str) -> NoReturn:
    raise _Unfit(f"{constant} is not JSON")


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise _Unfit(f"a number has {len(digits)} digits, and none may have more than {DIGITS}")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits) if len(digits) <= LONGEST_REAL else math.inf
    if math.isinf(value):
        raise _Unfit("a number is too large or too long")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Unfit("a key stands twice in one object")
    return found
