"""Rows of tokens, memberships, sign-ins and rate limits. People themselves are Django's users."""

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
    # A token with a run opens that run and nothing else of the project.
    run = models.ForeignKey("registry.Run", on_delete=models.CASCADE, null=True, related_name="tokens")
    # The token that this one takes the place of; that one goes on working until the overlap ends.
    rotated_from = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="rotated_to")
    created_by = models.CharField(max_length=120, blank=True)
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


class SignIn(models.Model):
    """One session of a person, so that they can see where they are signed in and end it. Goes with its session."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="sign_ins")
    session_key = models.CharField(max_length=40, unique=True)
    address = models.CharField(max_length=45, blank=True)
    agent = models.CharField(max_length=200, blank=True)
    at = models.DateTimeField(db_default=Now())

    class Meta:
        """Newest first."""

        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.user} signed in"


class Bucket(models.Model):
    """A token bucket: what is left, and when that was so. The key is a digest, so that the table names nobody."""

    key = models.CharField(max_length=64, primary_key=True)
    left = models.FloatField()
    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.left:.1f} left"
