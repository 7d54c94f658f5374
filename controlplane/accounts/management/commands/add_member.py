"""`manage.py add_member USER PROJECT ROLE`"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from controlplane.accounts import services
from controlplane.accounts.models import Membership
from controlplane.registry import selectors
from controlplane.registry.errors import Refusal


class Command(BaseCommand):
    """Gives a person a role in a project."""

    help = "Gives a person a role in a project, in place of an earlier one."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Who, where, as what."""
        parser.add_argument("user")
        parser.add_argument("project")
        parser.add_argument("role", choices=Membership.Role.values)

    def handle(self, *_: Any, **options: Any) -> None:
        """Says what holds now."""
        user = get_user_model().objects.filter(username=options["user"]).first()
        if user is None:
            raise CommandError(f"There is no user {options['user']}; make one with createsuperuser.")
        try:
            project = selectors.project(options["project"])
        except Refusal as error:
            raise CommandError(f"{error.detail} Make it with create_project.") from error
        services.set_membership(user, project, options["role"], actor="command line")
        self.stdout.write(f"{user.get_username()} is {options['role']} of {project.slug}.")
