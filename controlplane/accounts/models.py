"""Rows of tokens and memberships. People themselves are Django's users."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Now


class Token(models.Model):
    """A bearer credential of a project. Only an HMAC of its secret is kept."""

    class Role(models.TextChoices):
        """What the holder may do."""

        PUBLISHER = "publisher"
        ISLAND = "island"
        OPERATOR = "operator"
        VIEWER = "viewer"

    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="tokens")
    role = models.CharField(max_length=12, choices=Role.choices)
    name = models.CharField(max_length=80)
    key_id = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    pepper = models.PositiveIntegerField()
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.role} token {self.name}"


class Membership(models.Model):
    """The role of a person in a project."""

    class Role(models.TextChoices):
        """What the person may do."""

        VIEWER = "viewer"
        OPERATOR = "operator"
        ADMIN = "admin"

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=12, choices=Role.choices)

    class Meta:
        """One role per person and project."""

        constraints = [models.UniqueConstraint(fields=["user", "project"], name="membership_once")]

    def __str__(self) -> str:
        return f"{self.user} as {self.role} of {self.project}"
