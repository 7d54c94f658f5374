"""The Django application `api`."""

from __future__ import annotations

from django.apps import AppConfig


class ApiConfig(AppConfig):
    """Names the application."""

    name = "controlplane.api"
    default_auto_field = "django.db.models.BigAutoField"
