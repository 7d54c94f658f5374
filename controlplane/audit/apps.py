"""The Django application `audit`."""

from __future__ import annotations

from django.apps import AppConfig


class AuditConfig(AppConfig):
    """Names the application."""

    name = "controlplane.audit"
    default_auto_field = "django.db.models.BigAutoField"
