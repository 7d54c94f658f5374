"""`manage.py restore IN`"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from controlplane.embedded import backup
from controlplane.embedded.place import database_of_settings, stored_blobs
from controlplane.embedded.postgres import EmbeddedPostgresError, set_aside
from controlplane.registry import heads


class Command(BaseCommand):
    """Puts a backup in place and raises the generation of all heads."""

    help = (
        "Puts the backup in folder IN in place, brings the database up to date and raises the generation of all heads, "
        "so that islands go on by themselves. Stop the control plane first."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Where from."""
        parser.add_argument("source", metavar="in", type=Path, help="folder that `manage.py backup` wrote")
        parser.add_argument("--replace", action="store_true", help="throw away what the database holds now")

    def handle(self, *_: Any, **options: Any) -> None:
        """Says what holds now."""
        home, source = Path(settings.MAILBOAT_HOME), options["source"].absolute()
        try:
            note = backup.describe(source)
            _require_stopped(home)
            kept = set_aside(home) if settings.MAILBOAT_DATABASE.embedded else None
            with database_of_settings() as server:
                backup.restore(
                    server, source, blobs=stored_blobs(), secrets=home / "secrets", replace=options["replace"]
                )
                call_command("migrate", interactive=False, skip_checks=True, verbosity=0)
                generation = heads.raise_generation(actor="command line")
                connections.close_all()
        except (backup.BackupError, EmbeddedPostgresError) as error:
            raise CommandError(str(error)) from error
        if kept is not None:
            self.stdout.write(f"The data of the PostgreSQL before lies in {kept}.")
        self.stdout.write(f"Restored the backup of {note['at']}; heads have generation {generation}.")


def _require_stopped(home: Path) -> None:
    """The lock that `manage.py up` holds. Services on other machines are the operator's to stop."""
    home.mkdir(parents=True, exist_ok=True)
    lock = os.open(home / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise backup.BackupError(f"Mailboat runs in {home}: stop it before you restore.") from error
    finally:
        os.close(lock)
