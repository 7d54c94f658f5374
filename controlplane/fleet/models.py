"""Rows of islands and of what they say. What an island claims stands apart from what was checked."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models.functions import Now


class EnrolmentToken(models.Model):
    """A token that turns a machine into an island: once, or (`reusable`) any number of machines, each of which then
    waits for an operator's approval. Only an HMAC of its secret is kept.
    """

    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="enrolment_tokens")
    run = models.ForeignKey("registry.Run", on_delete=models.CASCADE, related_name="enrolment_tokens")
    channel = models.ForeignKey("registry.Channel", on_delete=models.CASCADE, related_name="enrolment_tokens")
    reusable = models.BooleanField(default=False)
    name = models.SlugField(max_length=60)  # of the island to come; of the key itself when it is reusable
    provider = models.CharField(max_length=60, blank=True)
    region = models.CharField(max_length=60, blank=True)
    engine = models.CharField(max_length=20, default="checkpoint")
    created_by = models.CharField(max_length=120, blank=True)
    key_id = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    pepper = models.PositiveIntegerField()
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)  # last, when it is reusable
    revoked_at = models.DateTimeField(null=True)
    island = models.ForeignKey("Island", on_delete=models.SET_NULL, null=True, related_name="enrolment_tokens")

    def __str__(self) -> str:
        return f"enrolment of {self.name}"


class Island(models.Model):
    """One rollout serving unit."""

    class Phase(models.TextChoices):
        """Where its sync loop stands."""

        IDLE = "idle"
        FETCHING = "fetching"
        PREPARING = "preparing"
        COMMITTING = "committing"
        ERROR = "error"
        FENCED = "fenced"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="islands")
    run = models.ForeignKey("registry.Run", on_delete=models.CASCADE, related_name="islands")
    channel = models.ForeignKey("registry.Channel", on_delete=models.PROTECT, related_name="islands")
    name = models.SlugField(max_length=60)
    provider = models.CharField(max_length=60, blank=True)
    region = models.CharField(max_length=60, blank=True)
    engine = models.CharField(max_length=20)
    agent_version = models.CharField(max_length=40, blank=True)
    hostname = models.CharField(max_length=120, blank=True)
    cores = models.PositiveIntegerField(null=True)
    codecs = models.JSONField(default=list)
    # Measured by the island itself; what its plans are made for.
    link_bytes_per_second = models.BigIntegerField(null=True)
    apply_bytes_per_second = models.BigIntegerField(null=True)
    quick_bytes_per_second = models.BigIntegerField(null=True)  # the same from patches with nothing contextual in them
    trusted_keys = models.JSONField(default=list)  # public keys of publishers (hex) that it was started with
    members = models.JSONField(default=list)  # member hosts: {name, version, phase, reason}
    token = models.OneToOneField("accounts.Token", on_delete=models.SET_NULL, null=True, related_name="island")
    # The credential that is to take the place of `token`: each heartbeat hands out its newest secret until it is used.
    next_token = models.OneToOneField(
        "accounts.Token", on_delete=models.SET_NULL, null=True, related_name="next_island"
    )
    rotation_asked_at = models.DateTimeField(null=True)
    # Ed25519, hex; whoever enrolled with it proved to hold its private half. Empty for one-time tokens.
    public_key = models.CharField(max_length=64, blank=True)
    pending = models.BooleanField(default=False)  # self-enrolled and not approved yet: may ask for its status alone
    approved_by = models.CharField(max_length=120, blank=True)
    # What operators asked for. `revision` moves with every change of these and is the row's ETag.
    revision = models.PositiveIntegerField(default=1)
    enabled = models.BooleanField(default=True)
    draining_since = models.DateTimeField(null=True)
    drain_until = models.DateTimeField(null=True)
    drain_reason = models.TextField(blank=True)
    pin = models.OneToOneField("registry.Channel", on_delete=models.PROTECT, null=True, related_name="pinned_island")
    pin_reason = models.TextField(blank=True)
    # What the last heartbeat claimed.
    version_number = models.BigIntegerField(null=True)
    digest = models.CharField(max_length=64, blank=True)
    epoch = models.PositiveIntegerField(null=True)
    phase = models.CharField(max_length=12, choices=Phase.choices, default=Phase.IDLE)
    reason = models.TextField(blank=True)
    active_requests = models.PositiveIntegerField(null=True)
    # Why the last sync was not accepted; empty once one was.
    last_error = models.TextField(blank=True)
    disabled_reason = models.TextField(blank=True)
    # What it refused as forged, replayed or expired; stays until it accepts a head again.
    alarm = models.TextField(blank=True)
    alarm_at = models.DateTimeField(null=True)
    # What a verified sync report proved against the record: the only meaning of "at version N".
    verified_version = models.ForeignKey(
        "registry.Version", on_delete=models.SET_NULL, null=True, related_name="islands"
    )
    enrolled_at = models.DateTimeField(db_default=Now())
    last_seen_at = models.DateTimeField(null=True)
    clock_skew_seconds = models.FloatField(null=True)
    last_sync_at = models.DateTimeField(null=True)
    last_patch_bytes = models.BigIntegerField(null=True)
    last_seconds = models.JSONField(null=True)

    class Meta:
        """Names are unique within a project."""

        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["project", "name"], name="island_name_once"),
            models.UniqueConstraint(
                fields=["project", "public_key"], condition=~models.Q(public_key=""), name="island_key_once"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class SyncReport(models.Model):
    """The outcome of one sync, as the island told it and as it was judged."""

    class Outcome(models.TextChoices):
        """What happened on the island."""

        APPLIED = "applied"
        FAILED = "failed"

    island = models.ForeignKey(Island, on_delete=models.CASCADE, related_name="sync_reports")
    from_version = models.BigIntegerField(null=True)
    to_version = models.BigIntegerField()
    digest = models.CharField(max_length=64, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices)
    verified = models.BooleanField(default=False)
    accepted = models.BooleanField(default=False)
    bytes = models.BigIntegerField(default=0)
    seconds = models.JSONField(default=dict)
    error = models.TextField(blank=True)
    route = models.JSONField(default=list)
    reported_at = models.DateTimeField(db_default=Now())

    class Meta:
        """Newest first."""

        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.island} {self.outcome} {self.to_version}"


class Breach(models.Model):
    """An island that was further behind its channel than the run's staleness budget allows, from when to when."""

    class Kind(models.TextChoices):
        """Which of the two limits."""

        VERSIONS = "versions"
        SECONDS = "seconds"

    run = models.ForeignKey("registry.Run", on_delete=models.CASCADE, related_name="breaches")
    island = models.ForeignKey(Island, on_delete=models.CASCADE, related_name="breaches")
    kind = models.CharField(max_length=8, choices=Kind.choices)
    limit = models.PositiveIntegerField()
    worst = models.PositiveBigIntegerField()
    began_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)

    class Meta:
        """At most one goes on per island and limit."""

        ordering = ["-began_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["island", "kind"], condition=models.Q(ended_at__isnull=True), name="breach_open_once"
            ),
        ]
        verbose_name_plural = "breaches"

    def __str__(self) -> str:
        return f"{self.island} beyond {self.limit} {self.kind}"


class Challenge(models.Model):
    """A question that only an island holding the bytes can answer.

    open -> answered -> passed | failed; open -> moved (the island holds another version) | expired.
    """

    class State(models.TextChoices):
        """Where the question stands."""

        OPEN = "open"
        ANSWERED = "answered"
        PASSED = "passed"
        FAILED = "failed"
        MOVED = "moved"
        EXPIRED = "expired"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    island = models.ForeignKey(Island, on_delete=models.CASCADE, related_name="challenges")
    job = models.ForeignKey("jobs.Job", on_delete=models.CASCADE, related_name="challenges")
    version = models.ForeignKey("registry.Version", on_delete=models.CASCADE, related_name="challenges")
    nonce = models.CharField(max_length=64)
    ranges = models.JSONField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    answer = models.CharField(max_length=64, blank=True)
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(db_default=Now())
    answered_at = models.DateTimeField(null=True)

    class Meta:
        """The open ones of an island are asked for on every heartbeat."""

        ordering = ["created_at"]
        indexes = [models.Index(fields=["island", "state"], name="challenge_by_island")]

    def __str__(self) -> str:
        return f"challenge {self.id} of {self.island}"
