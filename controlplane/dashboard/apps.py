"""The Django application `dashboard`: pages for people. It owns no rows."""

from __future__ import annotations

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    """Names the application."""

    name = "controlplane.dashboard"
