"""The time, as the database sees it: the only clock that decides anything."""

from __future__ import annotations

from datetime import datetime

from django.db import connection


def now() -> datetime:
    """The moment of this statement: the same clock as Django's `Now()`."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        (moment,) = cursor.fetchone()
    assert isinstance(moment, datetime)  # noqa: S101  what PostgreSQL returns for timestamptz
    return moment
