"""`manage.py head_keys [list | add | announce | retire NUMBER]`"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane import head_keys
from controlplane.env import EnvironmentProblem
from controlplane.registry import heads
from mailboat.identity import fingerprint


class Command(BaseCommand):
    """Shows and rotates the keys that sign heads."""

    help = (
        "Shows the public keys that heads are signed with. To rotate: `add` (heads carry the signatures of both keys, "
        "and the old one vouches for the new one), wait until every island has been there, then `retire` the old one."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """What to do."""
        parser.add_argument("action", nargs="?", choices=["list", "add", "announce", "retire"], default="list")
        parser.add_argument("number", nargs="?", type=int, help="the key to retire")

    def handle(self, *_: Any, **options: Any) -> None:
        """Says which keys there are now."""
        if (options["action"] == "retire") != (options["number"] is not None):
            raise CommandError("Say which key to retire: manage.py head_keys retire NUMBER.")
        try:
            if options["action"] == "add":
                head_keys.add()
            if options["action"] == "retire":
                head_keys.retire(options["number"])
            if options["action"] != "list":
                self.stdout.write(f"{heads.announce_keys()} heads are signed anew.")
            for number, public_key in head_keys.public().items():
                self.stdout.write(f"{number} {public_key} {fingerprint(public_key)}")
        except EnvironmentProblem as problem:
            raise CommandError(str(problem)) from problem
