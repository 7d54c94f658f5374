"""The Django application `registry`."""

from __future__ import annotations

from django.apps import AppConfig


class RegistryConfig(AppConfig):
    """Names the application."""

    name = "controlplane.registry"
    default_auto_field = "django.db.models.BigAutoField"
