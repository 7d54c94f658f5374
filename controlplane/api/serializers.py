"""What the API accepts. Only shapes: the services decide whether it makes sense."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.fleet.models import Island, SyncReport
from controlplane.jobs.models import Job
from controlplane.registry.models import Run

BIG = (1 << 63) - 1
SMALL = (1 << 31) - 1
HEX64 = r"^[0-9a-f]{64}\Z"


class Whole(serializers.IntegerField):
    """A number that is a JSON integer, not a text or a fraction that looks like one, and fits a database column."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"min_value": 0, "max_value": BIG, **options})

    def to_internal_value(self, data: Any) -> int:
        """Refuses everything but integers."""
        if type(data) is not int:
            self.fail("invalid")
        return int(super().to_internal_value(data))


class NewRun(serializers.Serializer):
    """POST runs."""

    name = serializers.SlugField(max_length=80)
    served_format = serializers.CharField(max_length=40, default="bf16")
    announce = serializers.ChoiceField(Run.Announce.choices, default=Run.Announce.VALIDATED)


class EditRun(serializers.Serializer):
    """PATCH runs/{run}: the settings that are to change; null lifts a limit."""

    announce = serializers.ChoiceField(Run.Announce.choices, required=False)
    keep_versions = Whole(min_value=1, max_value=SMALL, allow_null=True, required=False)
    keep_days = Whole(min_value=1, max_value=SMALL, allow_null=True, required=False)
    anchor_every = Whole(min_value=1, max_value=SMALL, allow_null=True, required=False)
    staleness_versions = Whole(max_value=SMALL, allow_null=True, required=False)
    staleness_seconds = Whole(max_value=SMALL, allow_null=True, required=False)

    def to_internal_value(self, data: Any) -> Any:
        """A name that is no setting is a mistake, not something to pass over."""
        unknown = sorted(map(str, data.keys() - self.fields.keys())) if isinstance(data, dict) else []
        if unknown:
            raise serializers.ValidationError(
                {unknown[0][:80]: f"It is no setting; those are {', '.join(self.fields)}."}
            )
        return super().to_internal_value(data)


class EditChannel(serializers.Serializer):
    """PUT channels/{name}: where it points (null: where it is), and whether it moves by hand alone."""

    version = Whole(allow_null=True, default=None)
    protected = serializers.BooleanField(default=False)
    reason = serializers.CharField(max_length=1000, allow_blank=True, default="")


class NewEpoch(serializers.Serializer):
    """POST epochs."""

    from_version = Whole(allow_null=True, default=None)
    reason = serializers.CharField(max_length=300)


class NewBlob(serializers.Serializer):
    """POST blobs."""

    sha256 = serializers.RegexField(HEX64)
    size = Whole(max_value=1 << 44)
    direct = serializers.BooleanField(default=False)  # whether parts may go straight to the blob store


class NewVersion(serializers.Serializer):
    """POST versions: an envelope with its anchor, or a checkpoint that a worker reads."""

    envelope = serializers.DictField(required=False)
    anchor = serializers.ListField(allow_null=True, default=None)
    checkpoint = serializers.CharField(max_length=4096, required=False, trim_whitespace=False)
    number = Whole(required=False)
    parent = Whole(allow_null=True, required=False)  # type: ignore[assignment]  # a field of the document
    epoch = Whole(required=False)
    step = Whole(allow_null=True, default=None)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Exactly one of the two forms."""
        if ("envelope" in attrs) == ("checkpoint" in attrs):
            raise serializers.ValidationError("Send either an envelope or a checkpoint with number, parent and epoch.")
        if "checkpoint" in attrs and not {"number", "parent", "epoch"} <= attrs.keys():
            raise serializers.ValidationError("A checkpoint needs number, parent (null for the first) and epoch.")
        return attrs


class NewEnrolmentToken(serializers.Serializer):
    """POST enrolment-tokens."""

    run = serializers.SlugField(max_length=80)
    channel = serializers.SlugField(max_length=40, default="latest")
    name = serializers.SlugField(max_length=60)
    provider = serializers.CharField(max_length=60, allow_blank=True, default="")
    region = serializers.CharField(max_length=60, allow_blank=True, default="")
    engine = serializers.CharField(max_length=20, default="checkpoint")
    reusable = serializers.BooleanField(default=False)
    days = Whole(min_value=1, max_value=365, allow_null=True, default=None)


class Enrol(serializers.Serializer):
    """POST islands/enrol."""

    token = serializers.CharField(max_length=200)
    name = serializers.SlugField(max_length=60, allow_blank=True, allow_null=True, default="")
    engine = serializers.CharField(max_length=20, allow_blank=True, default="")
    agent_version = serializers.CharField(max_length=40, allow_blank=True, default="")
    cores = Whole(max_value=1 << 20, allow_null=True, default=None)
    codecs = serializers.ListField(child=serializers.CharField(max_length=40), max_length=50, default=list)
    hostname = serializers.CharField(max_length=120, allow_blank=True, default="")
    public_key = serializers.RegexField(r"^([0-9a-f]{64})?\Z", allow_blank=True, default="")
    signature = serializers.RegexField(r"^([0-9a-f]{128})?\Z", allow_blank=True, default="")


class Heartbeat(serializers.Serializer):
    """POST islands/{id}/heartbeat."""

    version = Whole(allow_null=True, default=None)
    digest = serializers.RegexField(HEX64, allow_null=True, allow_blank=True, default="")
    epoch = Whole(max_value=(1 << 31) - 1, allow_null=True, default=None)
    phase = serializers.ChoiceField(Island.Phase.choices)
    reason = serializers.CharField(allow_blank=True, allow_null=True, max_length=4000, default="")
    time = serializers.FloatField(allow_null=True, default=None, min_value=-1e12, max_value=1e12)
    active_requests = Whole(max_value=(1 << 31) - 1, allow_null=True, default=None)


class Report(serializers.Serializer):
    """POST islands/{id}/syncs."""

    from_version = Whole(allow_null=True, default=None)
    version = Whole()
    digest = serializers.RegexField(HEX64, allow_null=True, allow_blank=True, default="")
    outcome = serializers.ChoiceField(SyncReport.Outcome.choices)
    verified = serializers.BooleanField(default=False)
    error = serializers.CharField(allow_blank=True, allow_null=True, max_length=8000, default="")
    bytes = Whole(default=0)
    seconds = serializers.DictField(child=serializers.FloatField(), default=dict)
    route = serializers.ListField(max_length=2000, default=list)


class Answer(serializers.Serializer):
    """POST islands/{id}/challenges/{c}."""

    version = Whole(allow_null=True, default=None)
    digest = serializers.RegexField(HEX64, allow_null=True, allow_blank=True, default="")
    answer = serializers.RegexField(HEX64, allow_null=True, allow_blank=True, default="")
    error = serializers.CharField(allow_blank=True, allow_null=True, max_length=1000, default="")


class NewJob(serializers.Serializer):
    """POST jobs: replay of a version, or verify of an island."""

    kind = serializers.ChoiceField([Job.Kind.REPLAY, Job.Kind.VERIFY])
    run = serializers.SlugField(max_length=80, required=False)
    version = Whole(required=False)
    island = serializers.UUIDField(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Each kind names its object."""
        needed = {"run", "version"} if attrs["kind"] == Job.Kind.REPLAY else {"island"}
        if not needed <= attrs.keys():
            raise serializers.ValidationError(f"A {attrs['kind']} job needs {' and '.join(sorted(needed))}.")
        return attrs
