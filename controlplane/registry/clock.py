"""The time, as the database sees it: the only clock that decides anything."""

from __future__ import annotations

from datetime import datetime

from django.db import connection


def now() -> datetime:
    """The start of the current transaction, or of this statement outside one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        (moment,) = cursor.fetchone()
    assert isinstance(moment, datetime)  # noqa: S101  what PostgreSQL returns for timestamptz
    return moment
