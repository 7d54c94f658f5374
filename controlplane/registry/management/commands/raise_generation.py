"""`manage.py raise_generation`"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from controlplane.registry import heads


class Command(BaseCommand):
    """Gives all heads a generation above every earlier one."""

    help = (
        "Gives all heads a new generation. Needed once after the database went back in time by other means than "
        "`manage.py restore` (which does it by itself); islands refuse the rewound serials until then."
    )

    def handle(self, *_: Any, **__: Any) -> None:
        """Says the new generation."""
        self.stdout.write(f"Generation {heads.raise_generation(actor='command line')}.")
