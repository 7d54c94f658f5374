"""``manage.py up``: the whole control plane on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from argparse import ArgumentTypeError
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.embedded.stack import Stack, StackError


class Command(BaseCommand):
    """Starts everything and waits."""

    help = "Run PostgreSQL (unless DATABASE_URL is set), web server, workers and scheduler until Ctrl-C."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Where to listen."""
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
        parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default: %(default)s)")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Runs until a signal asks to stop."""
        ended = threading.Event()
        for asked in (signal.SIGTERM, signal.SIGINT):  # a shell without job control starts `up &` deaf to SIGINT
            signal.signal(asked, _interrupt)
        started = time.monotonic()
        try:
            with Stack(settings.MAILBOAT_HOME, options["port"], host=options["host"]) as stack:
                stack.wait_ready()
                self.stdout.write(
                    f"Mailboat is up at {stack.url} after {time.monotonic() - started:.1f} s. Ctrl-C stops it."
                )
                ended.wait()
        except StackError as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            self.stdout.write("Stopped.")


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ArgumentTypeError(f"{text!r} is not a port; give a number from 1 to 65535")
    return int(text)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
