"""The Django application `accounts`."""

from __future__ import annotations

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Names the application."""

    name = "controlplane.accounts"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Begins to listen for sign-ins."""
        from controlplane.accounts import sessions  # noqa: F401  connects its receiver
