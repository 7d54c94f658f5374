"""Sync reports on their way: a success is kept durably until the control plane has it, so that a kill or an outage
can't lose it.
"""

from __future__ import annotations

from typing import Any

from mailboat.client import Api
from mailboat.errors import MailboatError
from mailboat.island.marker import Marker
from mailboat.island.store import Store


class Outbox:
    """Holds the newest success until it is sent; failures are sent once, as news that may get lost."""

    def __init__(self, store: Store, api: Api, island: str) -> None:
        self._store = store
        self._api = api
        self._island = island

    def put(self, report: dict[str, Any]) -> None:
        """Keeps a success durably; a newer one replaces it."""
        self._store.set_note("report", {"sent": False, "report": report})

    def send(self) -> None:
        """Sends what is kept and not sent. Raises ApiError or Unreachable; it is then still kept."""
        kept = self._store.note("report")
        if kept is None or kept.get("sent") or not isinstance(kept.get("report"), dict):
            return
        self._api.report_sync(self._island, kept["report"])
        self._store.set_note("report", {"sent": True, "report": kept["report"]})

    def try_send(self, report: dict[str, Any]) -> None:
        """Sends a failure once."""
        try:
            self._api.report_sync(self._island, report)
        except MailboatError:
            return  # the heartbeat carries the reason as well

    def after_start(self, held: Marker) -> None:
        """Makes up the report of a version that was finished by a restart."""
        if self._of(held) is not None:
            return
        self.put(
            {
                "from_version": None,
                "version": held.version,
                "digest": held.state,
                "outcome": "applied",
                "verified": True,
                "error": None,
                "bytes": 0,
                "seconds": {"fetch": 0.0, "prepare": 0.0, "commit": 0.0, "total": 0.0},
                "route": ["restart"],
            }
        )

    def repeat(self, held: Marker) -> None:
        """Sends the report of what is held once more: the control plane has lost it, or gone back to before it. What
        was never reported is not made up here: it may not be proven on all hosts yet. Raises ApiError or Unreachable;
        it is asked for again then.
        """
        report = self._of(held)
        if report is not None and (self._store.note("report") or {}).get("sent"):  # else it is on its way
            self._api.report_sync(self._island, report)

    def _of(self, held: Marker) -> dict[str, Any] | None:
        """The report that is kept, when it is of what is held."""
        report = (self._store.note("report") or {}).get("report")
        if isinstance(report, dict) and (report.get("version"), report.get("digest")) == (held.version, held.state):
            return report
        return None
