"""Kombu's queue on PostgreSQL, for a database that dies under a worker.

An acknowledgement that fails as the database goes down would be counted as a message in hand for ever: the connection
mends itself beneath Celery, which never starts over, and a worker that takes one message at a time would take no more.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import pgmq


class Channel(pgmq.Channel):
    """Lets go of a message whether or not the queue could be told: it comes again, and finds its job finished."""

    def basic_ack(self, delivery_tag: Any, multiple: bool = False) -> None:
        """Acknowledge a message. Raises what the database's client raises."""
        try:
            super().basic_ack(delivery_tag, multiple)  # type: ignore[no-untyped-call]
        except Exception:
            self.qos.ack(delivery_tag)
            raise


class Transport(pgmq.Transport):
    """`pgmq://`, with that channel."""

    Channel = Channel
