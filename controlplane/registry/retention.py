"""The one door through which what was published may leave the database.

Triggers refuse to delete versions, patches, their parts, anchors, inventories, epochs and blobs, unless the
transaction says that retention is at work. Nothing may ever be *changed*, here neither. Only code that has checked
that no retained route, live island or job needs the rows may open the door.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction


@contextmanager
def removing() -> Iterator[None]:
    """A transaction that may delete published rows; what it does afterwards, in an outer transaction, may not."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('mailboat.retention', 'on', true)")
        try:
            yield
        finally:
            if connection.connection is not None and not connection.needs_rollback:
                cursor.execute("SELECT set_config('mailboat.retention', 'off', true)")
