"""`manage.py openapi`: writes the OpenAPI document where it is committed, or says that it has drifted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.api import schema_views


class Command(BaseCommand):
    """Writes docs/api/openapi.yaml."""

    help = "Write docs/api/openapi.yaml from the code; with --check only compare."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Options."""
        parser.add_argument("--check", action="store_true", help="exit with 1 when the committed document differs")

    def handle(self, *_: Any, **options: Any) -> None:
        """Runs it."""
        place = Path(settings.BASE_DIR) / "docs" / "api" / "openapi.yaml"
        if not options["check"]:
            place.write_bytes(schema_views.document())
        elif not place.exists() or place.read_bytes() != schema_views.document():
            raise CommandError("docs/api/openapi.yaml is not what the code answers; run `manage.py openapi`.")
