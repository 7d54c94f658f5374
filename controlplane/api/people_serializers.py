"""What the API accepts about people, keys and orders to islands. Only shapes: the services decide whether it makes
sense.
"""

from __future__ import annotations

from rest_framework import serializers

from controlplane.accounts.models import Membership, Token
from controlplane.api.serializers import Whole

DAY = 86400
LONGEST_DRAIN = 7 * DAY
ROLES = [Token.Role.PUBLISHER, Token.Role.OPERATOR, Token.Role.VIEWER]  # islands get theirs by enrolment


class NewToken(serializers.Serializer):
    """POST tokens."""

    name = serializers.CharField(max_length=80)
    role = serializers.ChoiceField(ROLES)
    run = serializers.SlugField(max_length=80, allow_null=True, default=None)
    days = Whole(min_value=1, max_value=3650, allow_null=True, default=None)


class Rotation(serializers.Serializer):
    """POST tokens/{id}/rotate."""

    overlap_seconds = Whole(max_value=30 * DAY, default=DAY)
    days = Whole(min_value=1, max_value=3650, allow_null=True, default=None)


class NewMember(serializers.Serializer):
    """POST members."""

    name = serializers.CharField(max_length=150)
    role = serializers.ChoiceField(Membership.Role.choices)


class MemberRole(serializers.Serializer):
    """PATCH members/{user}."""

    role = serializers.ChoiceField(Membership.Role.choices)


class Reason(serializers.Serializer):
    """Orders that may be explained."""

    reason = serializers.CharField(max_length=1000, allow_blank=True, default="")


class RequiredReason(serializers.Serializer):
    """Orders that have to be explained."""

    reason = serializers.CharField(max_length=1000)


class Drain(Reason):
    """POST islands/{id}/drain."""

    deadline_seconds = Whole(min_value=1, max_value=LONGEST_DRAIN, default=600)


class Pin(Reason):
    """POST islands/{id}/pin."""

    version = Whole()


class Approval(serializers.Serializer):
    """POST islands/{id}/approve."""

    fingerprint = serializers.CharField(max_length=100)
