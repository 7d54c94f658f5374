"""`manage.py create_token --project SLUG --role ROLE --name NAME [--run RUN] [--days N]`"""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.accounts import services
from controlplane.accounts.models import Token
from controlplane.registry import selectors
from controlplane.registry.errors import Refusal

# An island gets its credential by enrolling.
ROLES = [str(role) for role in (Token.Role.PUBLISHER, Token.Role.OPERATOR, Token.Role.VIEWER)]


class Command(BaseCommand):
    """Makes a bearer token."""

    help = "Makes a bearer token and prints it. It is shown this once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Whose it is, what it may do, what it is called."""
        parser.add_argument("--project", required=True)
        parser.add_argument("--role", required=True, choices=ROLES)
        parser.add_argument("--name", required=True)
        parser.add_argument("--run", help="the only run that it opens; without it, every run of the project")
        parser.add_argument("--days", type=int, help="days until it expires; without it, never")

    def handle(self, *_: Any, **options: Any) -> None:
        """Prints the token alone, so that a script can take it."""
        days = options["days"]
        if days is not None and not 0 < days <= 36500:
            raise CommandError("--days must be from 1 to 36500.")
        try:
            project = selectors.project(options["project"])
        except Refusal as error:
            raise CommandError(f"{error.detail} Make it with create_project.") from error
        try:
            run = None if options["run"] is None else selectors.run(project, options["run"])
        except Refusal as error:
            raise CommandError(error.detail) from error
        lifetime = None if days is None else timedelta(days=days)
        actor = "command line"
        made = services.create_token(project, options["role"], options["name"], actor=actor, lifetime=lifetime, run=run)
        self.stdout.write(made[1])
