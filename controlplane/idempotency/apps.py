"""The Django application `idempotency`."""

from __future__ import annotations

from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """Names the application."""

    name = "controlplane.idempotency"
    default_auto_field = "django.db.models.BigAutoField"
