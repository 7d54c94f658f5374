"""The audit log. Rows are added, never changed and never removed: a trigger refuses both, for everybody."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Entry(models.Model):
    """One change: who did what to what, and how it looked before and after."""

    at = models.DateTimeField(db_default=Now())
    project = models.ForeignKey("registry.Project", on_delete=models.PROTECT, null=True, related_name="audit_entries")
    actor = models.CharField(max_length=120)
    action = models.CharField(max_length=60)
    target = models.CharField(max_length=200)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    request_id = models.CharField(max_length=64, blank=True)

    class Meta:
        """Newest first, per project."""

        ordering = ["-id"]
        indexes = [models.Index(fields=["project", "-id"], name="audit_by_project")]
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.target}"
