"""The Django application `accounts`."""

from __future__ import annotations

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Names the application."""

    name = "controlplane.accounts"
    default_auto_field = "django.db.models.BigAutoField"
