"""Rate limits: token buckets in PostgreSQL, so that every web process counts in one place.

A bucket holds `capacity` tokens and fills by `per_second`; a call takes one, and a call that finds none is refused with
the time to wait. The database's clock counts. Keys are hashed, so that the table says nothing about people.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass

from django.conf import settings
from django.db import connection

from controlplane.registry.errors import Refusal

# Fills the bucket up to now, then takes one; no row comes back when there was none to take.
_TAKE = """
INSERT INTO accounts_bucket AS bucket (key, "left", at) VALUES (%(key)s, %(capacity)s - 1, statement_timestamp())
ON CONFLICT (key) DO UPDATE SET at = statement_timestamp(), "left" =
  least(%(capacity)s, bucket."left" + %(rate)s * extract(epoch FROM statement_timestamp() - bucket.at)) - 1
WHERE least(%(capacity)s, bucket."left" + %(rate)s * extract(epoch FROM statement_timestamp() - bucket.at)) >= 1
RETURNING 0
"""
_MISSING = """
SELECT (1 - "left") / %(rate)s - extract(epoch FROM statement_timestamp() - at) FROM accounts_bucket WHERE key = %(key)s
"""
_FULL_AGAIN = "DELETE FROM accounts_bucket WHERE at < statement_timestamp() - interval '1 day'"


@dataclass(frozen=True, slots=True)
class Limit:
    """How many calls at once, and how many per second in the long run."""

    name: str
    capacity: float
    per_second: float


LOGIN_BY_NAME_AND_ADDRESS = Limit("login name address", 10, 1 / 60)  # ten tries, then one a minute
LOGIN_BY_NAME = Limit("login name", 100, 1 / 10)  # from many addresses at once
LOGIN_BY_ADDRESS = Limit("login address", 50, 1 / 6)
ENROL_BY_ADDRESS = Limit("enrol address", 300, 1)  # a rack of machines may start behind one address
PULL = Limit("pull", 3000, 50)  # plans and blobs of one credential; an anchor may have hundreds of files


class TooMany(Refusal):
    """The caller has used up its calls for now."""

    status = 429
    code = "too_many_requests"

    def __init__(self, seconds: int) -> None:
        super().__init__(f"Too many calls; try again in {seconds} s.", retry_after=seconds)
        self.seconds = seconds
        self.headers = {"Retry-After": str(seconds)}


def take(limit: Limit, who: str) -> None:
    """Counts one call of `who`. Raises TooMany; a call that is refused does not count."""
    values: dict[str, str | float] = {"key": _key(limit, who), "capacity": limit.capacity, "rate": limit.per_second}
    with connection.cursor() as cursor:
        cursor.execute(_TAKE, values)
        if cursor.fetchone() is not None:
            return
        cursor.execute(_MISSING, values)
        row = cursor.fetchone()
    raise TooMany(max(1, math.ceil(row[0])) if row else 1)


def forget_full() -> int:
    """Removes buckets that nobody has touched for a day: every one of them is full again by then."""
    with connection.cursor() as cursor:
        cursor.execute(_FULL_AGAIN)
        return int(cursor.rowcount)


def _key(limit: Limit, who: str) -> str:
    return hmac.new(settings.SECRET_KEY.encode(), f"{limit.name}:{who}".encode(), hashlib.sha256).hexdigest()
