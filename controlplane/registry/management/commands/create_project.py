"""`manage.py create_project SLUG [--name NAME]`"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.core.validators import validate_slug

from controlplane.registry import services
from controlplane.registry.errors import Refusal


class Command(BaseCommand):
    """Makes a project."""

    help = "Makes a project. With --exists-ok, one that is there already is fine."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """The slug stands in addresses."""
        parser.add_argument("slug")
        parser.add_argument("--name", default="")
        parser.add_argument("--exists-ok", action="store_true")

    def handle(self, *_: Any, **options: Any) -> None:
        """Says what was made."""
        slug = options["slug"]
        try:
            validate_slug(slug)
            services.create_project(slug, options["name"], actor="command line")
        except ValidationError as error:
            raise CommandError(f"{slug!r} can't stand in an address; use letters, digits, - and _.") from error
        except Refusal as error:
            if not options["exists_ok"]:
                raise CommandError(error.detail) from error
            self.stdout.write(f"Project {slug} exists.")
            return
        self.stdout.write(f"Project {slug} made.")
