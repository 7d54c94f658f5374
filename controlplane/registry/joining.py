"""Joins the parts of large uploads beside the requests that ask for it: a web process has few threads, and hashing
hundreds of gigabytes takes minutes. One at a time per process; two processes never join one upload at once.

A process that ends in the middle leaves the parts where they are: the next question starts again. It must never say
that an upload is done before its blob is in the store and in the database.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import structlog
from django.db import connection, connections

from controlplane.registry.models import Upload

log = structlog.get_logger(__name__)

PATIENCE = 0.3  # seconds that a question waits for its answer

Finish = Callable[[Upload], object]  # joins, checks and records


class Joins:
    """What a process joins, and what came of it."""

    def __init__(self) -> None:
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._found: dict[uuid.UUID, Future[None]] = {}

    def ask(self, upload: Upload, finish: Finish) -> bool:
        """Starts, or looks after, the join of an upload whose parts are all there: True when it is done. Raises what
        `finish` raised.
        """
        with self._lock:
            future = self._found.get(upload.pk)
            if future is None or future.done():  # what came of an earlier one is told by `outcome`
                future = self._found[upload.pk] = Future()
                name = f"join {upload.sha256[:12]}"
                threading.Thread(target=self._work, args=(future, upload, finish), name=name, daemon=True).start()
        try:
            future.result(PATIENCE)
        except TimeoutError:
            if not future.done():
                return False
            raise
        finally:
            if future.done():
                self._forget(upload, future)
        return True

    def outcome(self, upload: Upload) -> None:
        """Raises what the last join of the upload raised, once: afterwards its parts are gone."""
        with self._lock:
            future = self._found.get(upload.pk)
        if future is not None and future.done():
            self._forget(upload, future)
            future.result()

    def _forget(self, upload: Upload, future: Future[None]) -> None:
        with self._lock:
            if self._found.get(upload.pk) is future:
                del self._found[upload.pk]

    def _work(self, future: Future[None], upload: Upload, finish: Finish) -> None:
        try:
            with self._turn, _alone(upload):
                finish(upload)
            future.set_result(None)
        except Exception as error:  # noqa: BLE001  whoever asks next is told
            log.warning("joining an upload failed", upload=str(upload.pk), error=str(error)[:500])
            future.set_exception(error)
        finally:
            connections.close_all()


@contextmanager
def _alone(upload: Upload) -> Iterator[None]:
    """Whichever process joins the upload: the others wait, and find it done."""
    key = int.from_bytes(hashlib.sha256(b"join" + upload.pk.bytes).digest()[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [key])
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [key])


joins = Joins()
