"""Rows of background work.

queued -> running -> succeeded | failed; queued -> cancelled; running -> cancelling -> cancelled | succeeded | failed;
running -> queued when the lease runs out, or when the work waits for something outside (`waiting_for`) and lets its
worker go. Only `jobs.services` changes a state.
"""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Job(models.Model):
    """One piece of background work."""

    class Kind(models.TextChoices):
        """What the worker does."""

        BUILD = "build"
        VALIDATE = "validate"
        REPLAY = "replay"
        VERIFY = "verify"
        MERGE = "merge"
        ANCHOR = "anchor"
        COLLECT = "collect"
        DERIVE = "derive"

    class State(models.TextChoices):
        """Where the work stands."""

        QUEUED = "queued"
        RUNNING = "running"
        CANCELLING = "cancelling"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    UNFINISHED = (State.QUEUED, State.RUNNING, State.CANCELLING)
    FINISHED = (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    project = models.ForeignKey("registry.Project", on_delete=models.CASCADE, related_name="jobs")
    run = models.ForeignKey("registry.Run", on_delete=models.CASCADE, null=True, related_name="jobs")
    kind = models.CharField(max_length=12, choices=Kind.choices)
    params = models.JSONField(default=dict)
    dedupe_key = models.CharField(max_length=200)
    # The versions of a run are worked on in their order: a job starts only once this one has ended.
    after = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="followers")
    state = models.CharField(max_length=12, choices=State.choices, default=State.QUEUED)
    owner = models.CharField(max_length=120, blank=True)
    lease_expires_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    # A queued job that waits: what for, until when at most, and what it knows already when it goes on.
    waiting_for = models.CharField(max_length=200, blank=True)
    not_before = models.DateTimeField(null=True)
    saved = models.JSONField(null=True)
    attempt = models.PositiveIntegerField(default=1)
    done = models.BigIntegerField(default=0)
    total = models.BigIntegerField(null=True)
    unit = models.CharField(max_length=20, blank=True)
    result = models.JSONField(null=True)
    error = models.TextField(blank=True)
    requested_by = models.CharField(max_length=120)
    rerun_of = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="reruns")
    queued_at = models.DateTimeField(db_default=Now())
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        """A second trigger of the same work joins the unfinished one."""

        ordering = ["-queued_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["project", "dedupe_key"],
                condition=Q(state__in=["queued", "running", "cancelling"]),
                name="job_unfinished_once",
            ),
        ]
        indexes = [
            models.Index(fields=["project", "-queued_at"], name="job_by_project"),
            models.Index(
                fields=["state", "lease_expires_at"],
                condition=Q(state__in=["queued", "running", "cancelling"]),
                name="job_unfinished",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"

    @property
    def finished(self) -> bool:
        """True in a state that nothing leaves."""
        return self.state in self.FINISHED


class JobEvent(models.Model):
    """One line of a job's log."""

    class Level(models.TextChoices):
        """How much the line matters."""

        INFO = "info"
        WARNING = "warning"
        ERROR = "error"

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(db_default=Now())
    level = models.CharField(max_length=8, choices=Level.choices)
    message = models.TextField()

    class Meta:
        """In the order in which they were written."""

        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.level}: {self.message}"


class Worker(models.Model):
    """A process that works on jobs, as it says itself. Liveness follows from `heartbeat_at`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    name = models.CharField(max_length=120)
    host = models.CharField(max_length=120)
    process = models.PositiveIntegerField()
    queues = models.JSONField(default=list)
    device = models.CharField(max_length=200)
    versions = models.JSONField(default=dict)
    job = models.ForeignKey(Job, on_delete=models.SET_NULL, null=True, related_name="workers")
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    stopped_at = models.DateTimeField(null=True)

    class Meta:
        """By name, the newest process first."""

        ordering = ["name", "-started_at"]

    def __str__(self) -> str:
        return self.name


class ScheduledRun(models.Model):
    """When an entry of the schedule last ran, and how it went. The schedule itself is `jobs.schedule`."""

    name = models.CharField(max_length=40, primary_key=True)
    started_at = models.DateTimeField()
    seconds = models.FloatField(null=True)
    error = models.TextField(blank=True)

    def __str__(self) -> str:
        return self.name
