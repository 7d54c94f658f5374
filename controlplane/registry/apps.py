"""The Django application `registry`."""

from __future__ import annotations

from django.apps import AppConfig


class RegistryConfig(AppConfig):
    """Names the application."""

    name = "controlplane.registry"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connects the end of a job with the version that it worked on."""
        from controlplane.jobs.signals import job_ended
        from controlplane.registry.services import fail_unfinished

        job_ended.connect(lambda job, **_: fail_unfinished(job), weak=False, dispatch_uid="registry")
