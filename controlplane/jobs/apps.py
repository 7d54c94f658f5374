"""The Django application `jobs`."""

from __future__ import annotations

from django.apps import AppConfig


class JobsConfig(AppConfig):
    """Names the application."""

    name = "controlplane.jobs"
    default_auto_field = "django.db.models.BigAutoField"
