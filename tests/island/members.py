"""Member hosts as threads, and the leader that expects them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mailboat.island.members.follower import MemberOptions, run_member
from mailboat.island.members.lead import LeadOptions
from mailboat.island.stop import Stop
from tests.island.contract_server import ContractServer
from tests.waiting import PATIENCE

SECRET = "s" * 40


class RunningMember:
    """A member in a thread."""

    def __init__(self, options: MemberOptions) -> None:
        self.stop = Stop()
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self.thread.start()

    def _run(self, options: MemberOptions) -> None:
        try:
            run_member(options, stop=self.stop, say=self.lines.append)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error


@contextmanager
def member(store: Path, port: int, name: str = "b", secret: str = SECRET, **options: Any) -> Iterator[RunningMember]:
    leader = f"{'https' if options.get('ca_file') else 'http'}://127.0.0.1:{port}"
    options = {"leader": leader, "image": store / "image", **options}
    running = RunningMember(MemberOptions(name=name, secret=secret, store=store, **options))
    try:
        yield running
    finally:
        running.stop.set()
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()


def leading(port: int, *names: str, tls: tuple[str, str] | None = None) -> dict[str, Any]:
    """Options of an island that expects members."""
    return {"members": LeadOptions(names or ("b",), f"127.0.0.1:{port}", SECRET, tls), "poll_seconds": 1.0}


def rows(server: ContractServer) -> list[dict[str, Any]]:
    return server.beats[-1].get("members", []) if server.beats else []
