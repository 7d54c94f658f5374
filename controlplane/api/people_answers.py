"""What the API answers about people, keys, orders and workers, for the schema. `people_representations` makes these."""

from __future__ import annotations

from rest_framework import serializers as drf

from controlplane.accounts.models import Membership
from controlplane.accounts.models import Token as TokenRow
from controlplane.jobs.models import JobEvent


class Token(drf.Serializer):
    """An API token."""

    id = drf.IntegerField()
    name = drf.CharField()
    role = drf.ChoiceField(TokenRow.Role.choices)
    run = drf.CharField(allow_null=True)
    island = drf.UUIDField(allow_null=True)
    key_id = drf.CharField()
    state = drf.ChoiceField(["active", "expiring", "expired", "revoked"])
    reason = drf.CharField()
    created_by = drf.CharField(allow_null=True)
    created_at = drf.DateTimeField()
    expires_at = drf.DateTimeField(allow_null=True)
    last_used_at = drf.DateTimeField(allow_null=True)
    revoked_at = drf.DateTimeField(allow_null=True)
    rotated_from = drf.CharField(allow_null=True)


class Caller(drf.Serializer):
    """Who asks."""

    role = drf.CharField()
    actor = drf.CharField()
    run = drf.CharField(allow_null=True)
    island = drf.CharField(allow_null=True)
    expires_at = drf.DateTimeField(allow_null=True)
    server_version = drf.CharField()


class TokenOnce(Token):
    """An API token with its secret, which is shown once: a repeated answer is without it."""

    token = drf.CharField(required=False)


class Member(drf.Serializer):
    """A person in a project."""

    user = drf.IntegerField()
    name = drf.CharField()
    role = drf.ChoiceField(Membership.Role.choices)
    active = drf.BooleanField()
    last_login = drf.DateTimeField(allow_null=True)


class Session(drf.Serializer):
    """A place where a person is logged in."""

    id = drf.IntegerField()
    at = drf.DateTimeField()
    expires_at = drf.DateTimeField(allow_null=True)
    address = drf.CharField(allow_blank=True)
    agent = drf.CharField(allow_blank=True)
    current = drf.BooleanField()


class EnrolmentKey(drf.Serializer):
    """A one-time token or a self-enrolment key, without its secret."""

    id = drf.IntegerField()
    name = drf.CharField()
    reusable = drf.BooleanField()
    run = drf.CharField()
    channel = drf.CharField()
    provider = drf.CharField(allow_blank=True)
    region = drf.CharField(allow_blank=True)
    engine = drf.CharField(allow_blank=True)
    key_id = drf.CharField()
    state = drf.ChoiceField(["open", "used", "expired", "revoked"])
    created_by = drf.CharField(allow_null=True)
    created_at = drf.DateTimeField()
    expires_at = drf.DateTimeField()
    used_at = drf.DateTimeField(allow_null=True)
    revoked_at = drf.DateTimeField(allow_null=True)
    island = drf.UUIDField(allow_null=True)


class Pinned(drf.Serializer):
    """Where an island is held, and why."""

    version = drf.IntegerField(allow_null=True)
    reason = drf.CharField(allow_blank=True)


class Draining(drf.Serializer):
    """A drain and how far it is."""

    since = drf.DateTimeField()
    until = drf.DateTimeField(allow_null=True)
    reason = drf.CharField(allow_blank=True)
    active_requests = drf.IntegerField(allow_null=True)
    drained = drf.BooleanField()


class Credential(drf.Serializer):
    """An island's credential, without its secret."""

    key_id = drf.CharField()
    expires_at = drf.DateTimeField(allow_null=True)
    revoked_at = drf.DateTimeField(allow_null=True)
    last_used_at = drf.DateTimeField(allow_null=True)
    rotation_asked_at = drf.DateTimeField(allow_null=True)


class Orders(drf.Serializer):
    """What operators asked of an island, and its keys."""

    pending = drf.BooleanField()
    fingerprint = drf.CharField(allow_null=True)
    approved_by = drf.CharField(allow_null=True)
    pinned = Pinned(allow_null=True)
    drain = Draining(allow_null=True)
    credential = Credential(allow_null=True)
    revision = drf.IntegerField()


class AuditEntry(drf.Serializer):
    """One change."""

    id = drf.IntegerField()
    at = drf.DateTimeField()
    actor = drf.CharField()
    action = drf.CharField()
    target = drf.CharField()
    before = drf.DictField(allow_null=True)
    after = drf.DictField(allow_null=True)
    request_id = drf.CharField(allow_null=True)


class JobLine(drf.Serializer):
    """A line of a job's log."""

    id = drf.IntegerField()
    at = drf.DateTimeField()
    level = drf.ChoiceField(JobEvent.Level.choices)
    message = drf.CharField(allow_blank=True)


class JobLines(drf.Serializer):
    """A stretch of a job's log; `next` is what `after` continues with."""

    results = JobLine(many=True)
    next = drf.IntegerField(allow_null=True)


class Queue(drf.Serializer):
    """A queue as it stands."""

    name = drf.CharField()
    queued = drf.IntegerField()
    waiting = drf.IntegerField()
    running = drf.IntegerField()
    oldest_seconds = drf.FloatField(allow_null=True)
    workers = drf.IntegerField()
    messages = drf.IntegerField(allow_null=True)
    oldest_message_seconds = drf.FloatField(allow_null=True)


class Worker(drf.Serializer):
    """A process that works on jobs."""

    id = drf.UUIDField()
    name = drf.CharField()
    host = drf.CharField()
    process = drf.IntegerField()
    queues = drf.ListField(child=drf.CharField())
    device = drf.CharField()
    versions = drf.DictField(child=drf.CharField())
    state = drf.ChoiceField(["online", "lost", "stopped"])
    reason = drf.CharField()
    busy = drf.BooleanField()
    job = drf.UUIDField(allow_null=True)
    started_at = drf.DateTimeField()
    heartbeat_at = drf.DateTimeField()


class ScheduleEntry(drf.Serializer):
    """What runs by the clock."""

    name = drf.CharField()
    purpose = drf.CharField()
    when = drf.CharField()
    last_started_at = drf.DateTimeField(allow_null=True)
    last_seconds = drf.FloatField(allow_null=True)
    last_error = drf.CharField(allow_null=True)
