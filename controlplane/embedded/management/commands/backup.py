"""`manage.py backup OUT`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.embedded import backup
from controlplane.embedded.place import database_of_settings, stored_blobs


class Command(BaseCommand):
    """Writes a backup, while everything runs."""

    help = "Writes database, blobs (of a local store) and secrets into the folder OUT. The control plane may run."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Where to."""
        parser.add_argument("out", type=Path, help="folder; blobs that it holds from an earlier backup are kept")

    def handle(self, *_: Any, **options: Any) -> None:
        """Says what was written."""
        out = options["out"].absolute()
        secrets = Path(settings.MAILBOAT_HOME) / "secrets"
        try:
            with database_of_settings() as server:
                note = backup.back_up(server, out, blobs=stored_blobs(), secrets=secrets)
        except backup.BackupError as error:
            raise CommandError(str(error)) from error
        blobs = "blobs stay in the object store" if note["blobs"] is None else f"{note['blobs']} blobs"
        self.stdout.write(f"Backed up into {out}: database, {blobs}, secrets. Keep it as secret as the server itself.")
