"""Django's view of this package: it brings the command ``up`` and no rows."""

from __future__ import annotations

from django.apps import AppConfig


class EmbeddedConfig(AppConfig):
    """The embedded default."""

    name = "controlplane.embedded"
