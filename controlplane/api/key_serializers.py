"""Publishers' keys: what the API accepts and answers."""

from __future__ import annotations

from rest_framework import serializers as drf

from controlplane.api.serializers import HEX64
from controlplane.api.shapes import Body, Pattern, Text
from controlplane.registry.models import RunKey


class KeySignature(Body):
    """One signature of an envelope."""

    keyid = Text(max_length=64)
    sig = Text(max_length=128)


class SmallEnvelope(Body):
    """A key document in its envelope (docs/format/manifest.md)."""

    payload = Text(max_length=8192)
    payloadType = Text(max_length=100)  # noqa: N815  DSSE's name
    signatures = drf.ListField(child=KeySignature(), max_length=16)


class NewKey(Body):
    """POST runs/{run}/keys. An endorsement may be sent later, with the same key again."""

    public_key = Pattern(HEX64)
    name = Text(max_length=80, allow_blank=True, default="")
    endorsement = SmallEnvelope(allow_null=True, default=None)


class EndKey(Body):
    """DELETE runs/{run}/keys/{id}: why it is revoked."""

    reason = Text(max_length=300)


class Key(drf.Serializer):
    """A publisher's key."""

    id = drf.UUIDField()
    kind = drf.ChoiceField(RunKey.Kind.choices)
    public_key = drf.CharField()
    fingerprint = drf.CharField()
    name = drf.CharField()
    created_by = drf.CharField()
    created_at = drf.DateTimeField()
    revoked_at = drf.DateTimeField(allow_null=True)
    revoked_by = drf.CharField(allow_null=True)
    revoked_reason = drf.CharField(allow_null=True)


class TrustedKey(drf.Serializer):
    """A key, and the envelope by which an older one vouches for it (docs/format/manifest.md)."""

    public_key = drf.CharField()
    endorsement = drf.DictField(allow_null=True)


class Trust(drf.Serializer):
    """What an island may learn: it believes an endorsement, never this list."""

    publishers = TrustedKey(many=True)
    revoked = drf.ListField(child=drf.CharField())
    heads = TrustedKey(many=True)
