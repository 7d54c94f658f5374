"""Rows of answers that were given to creates with an `Idempotency-Key`."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

MAX_KEY = 200


class Reply(models.Model):
    """What one request with a key was answered, for a day.

    It is written in the transaction of the change that it answers: neither exists without the other.
    """

    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="replies")
    principal = models.CharField(max_length=160)
    key = models.CharField(max_length=MAX_KEY)
    fingerprint = models.CharField(max_length=64)  # of method, address and body
    status = models.PositiveSmallIntegerField(null=True)  # null only inside the transaction that is at work
    body = models.JSONField(null=True)  # null where the answer holds a secret, which is never kept
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """One answer per caller and key."""

        verbose_name_plural = "replies"
        constraints = [
            models.UniqueConstraint(fields=["project", "principal", "key"], name="reply_once"),
            models.CheckConstraint(condition=Q(fingerprint__regex=r"^[0-9a-f]{64}$"), name="reply_fingerprint_is_hex"),
        ]
        indexes = [models.Index(fields=["created_at"], name="reply_by_age")]

    def __str__(self) -> str:
        return f"{self.principal} {self.key}"
