"""The Django application `fleet`."""

from __future__ import annotations

from django.apps import AppConfig


class FleetConfig(AppConfig):
    """Names the application."""

    name = "controlplane.fleet"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Closes the questions of a job that has ended: nobody is left to judge an answer."""
        from controlplane.fleet.services import close_questions
        from controlplane.jobs.signals import job_ended

        job_ended.connect(lambda job, **_: close_questions(job), weak=False, dispatch_uid="fleet")
