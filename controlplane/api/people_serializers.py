"""What the API accepts about people, keys and orders to islands. Only shapes: the services decide whether it makes
sense.
"""

from __future__ import annotations

from controlplane.accounts.models import Membership, Token
from controlplane.api.shapes import Body, Choice, Slug, Text, Whole

DAY = 86400
LONGEST_DRAIN = 7 * DAY
ROLES = [Token.Role.PUBLISHER, Token.Role.OPERATOR, Token.Role.VIEWER]  # islands get theirs by enrolment


class NewToken(Body):
    """POST tokens."""

    name = Text(max_length=80)
    role = Choice(ROLES)
    run = Slug(max_length=80, allow_null=True, default=None)
    days = Whole(min_value=1, max_value=3650, allow_null=True, default=None)


class Rotation(Body):
    """POST tokens/{id}/rotate."""

    overlap_seconds = Whole(max_value=30 * DAY, default=DAY)
    days = Whole(min_value=1, max_value=3650, allow_null=True, default=None)


class NewMember(Body):
    """POST members."""

    name = Text(max_length=150)
    role = Choice(Membership.Role.choices)


class MemberRole(Body):
    """PATCH members/{user}."""

    role = Choice(Membership.Role.choices)


class Reason(Body):
    """Orders that may be explained."""

    reason = Text(max_length=1000, allow_blank=True, default="")


class RequiredReason(Body):
    """Orders that have to be explained."""

    reason = Text(max_length=1000)


class Drain(Reason):
    """POST islands/{id}/drain."""

    deadline_seconds = Whole(min_value=1, max_value=LONGEST_DRAIN, default=600)


class Pin(Reason):
    """POST islands/{id}/pin."""

    version = Whole()


class Approval(Body):
    """POST islands/{id}/approve."""

    fingerprint = Text(max_length=100)
