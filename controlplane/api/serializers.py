"""What the API accepts. Only shapes: the services decide whether it makes sense."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.shapes import Body, Choice, Flag, Identifier, Pattern, Real, Slug, Text, Whole
from controlplane.fleet.models import Island, SyncReport
from controlplane.jobs.models import Job
from controlplane.registry.models import Run
from controlplane.registry.needs import LONGEST_DAYS
from controlplane.registry.submission import MAX_ANCHOR_FILES
from mailboat.quantise import FORMATS

SMALL = (1 << 31) - 1
HEX64 = r"^[0-9a-f]{64}\Z"
PHASES, NAME = 50, 40  # of a sync, with their seconds; characters of each name
CHECKPOINT = {"checkpoint", "number", "parent", "epoch", "step"}  # what an envelope says by itself
OBJECTS = {  # what a job of a kind is about
    Job.Kind.REPLAY: {"run", "version"},
    Job.Kind.VERIFY: {"island"},
    Job.Kind.MERGE: {"run", "from", "to"},
    Job.Kind.ANCHOR: {"run", "version"},
    Job.Kind.COLLECT: {"run"},
}


class NewRun(Body):
    """POST runs."""

    name = Slug(max_length=80)
    served_format = Text(max_length=40, default="bf16")
    announce = Choice(Run.Announce.choices, default=Run.Announce.VALIDATED)
    # Derived: the run that is to be served in `format` as well.
    source = Slug(max_length=80, required=False)  # type: ignore[assignment]  # a field of the document
    format = Choice(FORMATS, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """A derived run names its source and its format, and inherits the rest."""
        if ("source" in attrs) != ("format" in attrs):
            raise serializers.ValidationError("A derived run names its source and its format.")
        if "source" in attrs and {"served_format", "announce"} & self.initial_data.keys():
            raise serializers.ValidationError("The format of a derived run says what it serves; leave the rest out.")
        return attrs


class EditRun(Body):
    """PATCH runs/{run}: the settings that are to change; null lifts a limit."""

    announce = Choice(Run.Announce.choices, required=False)
    encode_for = Choice(Run.EncodeFor.choices, required=False)
    keep_versions = Whole(min_value=1, max_value=SMALL, allow_null=True, required=False)
    keep_days = Whole(min_value=1, max_value=LONGEST_DAYS, allow_null=True, required=False)
    anchor_every = Whole(min_value=1, max_value=SMALL, allow_null=True, required=False)
    merge_up_to = Whole(max_value=SMALL, required=False)
    staleness_versions = Whole(max_value=SMALL, allow_null=True, required=False)
    staleness_seconds = Whole(max_value=SMALL, allow_null=True, required=False)


class EditChannel(Body):
    """PUT channels/{name}: where it points, and whether it moves by hand alone. What is unsaid stays as it is."""

    version = Whole(allow_null=True, default=None)
    protected = Flag(required=False)
    reason = Text(max_length=1000, allow_blank=True, default="")


class NewEpoch(Body):
    """POST epochs."""

    from_version = Whole(allow_null=True, default=None)
    from_state = Pattern(HEX64, allow_null=True, default=None)  # a state digest, which no version need have
    reason = Text(max_length=300)


class NewBlob(Body):
    """POST blobs."""

    sha256 = Pattern(HEX64)
    size = Whole(max_value=1 << 44)
    direct = Flag(default=False)  # whether parts may go straight to the blob store


class NewVersion(Body):
    """POST versions: an envelope with its anchor, or a checkpoint that a worker reads."""

    envelope = serializers.DictField(required=False)
    anchor = serializers.ListField(allow_null=True, default=None)
    checkpoint = Text(max_length=4096, required=False, trim_whitespace=False)
    number = Whole(required=False)
    parent = Whole(allow_null=True, required=False)  # type: ignore[assignment]  # a field of the document
    epoch = Whole(required=False)
    step = Whole(allow_null=True, default=None)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Exactly one of the two forms."""
        if ("envelope" in attrs) == ("checkpoint" in attrs):
            raise serializers.ValidationError("Send either an envelope or a checkpoint with number, parent and epoch.")
        others = CHECKPOINT if "envelope" in attrs else {"anchor"}
        if strange := sorted(others & self.initial_data.keys()):
            raise serializers.ValidationError(dict.fromkeys(strange, "It belongs to the other form of a commit."))
        if "checkpoint" in attrs and not {"number", "parent", "epoch"} <= attrs.keys():
            raise serializers.ValidationError("A checkpoint needs number, parent (null for the first) and epoch.")
        return attrs


class FileOfAnchor(Body):
    """One file of a checkpoint; whether the path may stand is for the services to say."""

    path = Text(max_length=1024, trim_whitespace=False)
    sha256 = Pattern(HEX64)
    size = Whole(max_value=1 << 44)


class NewAnchor(Body):
    """POST versions/{number}/anchor: where a checkpoint lies, and the files that make it."""

    uri = Text(max_length=2000)
    files = serializers.ListField(child=FileOfAnchor(), max_length=MAX_ANCHOR_FILES)


class NewEnrolmentToken(Body):
    """POST enrolment-tokens."""

    run = Slug(max_length=80)
    channel = Slug(max_length=40, default="latest")
    name = Slug(max_length=60)
    provider = Text(max_length=60, allow_blank=True, default="")
    region = Text(max_length=60, allow_blank=True, default="")
    engine = Text(max_length=20, default="checkpoint")
    reusable = Flag(default=False)
    days = Whole(min_value=1, max_value=365, allow_null=True, default=None)


class Enrol(Body):
    """POST islands/enrol."""

    token = Text(max_length=200)
    name = Slug(max_length=60, allow_blank=True, allow_null=True, default="")
    engine = Text(max_length=20, allow_blank=True, default="")
    agent_version = Text(max_length=40, allow_blank=True, default="")
    cores = Whole(max_value=1 << 20, allow_null=True, default=None)
    codecs = serializers.ListField(child=Text(max_length=40), max_length=50, default=list)
    hostname = Text(max_length=120, allow_blank=True, default="")
    public_key = Pattern(r"^([0-9a-f]{64})?\Z", allow_blank=True, default="")
    signature = Pattern(r"^([0-9a-f]{128})?\Z", allow_blank=True, default="")


class MemberHost(Body):
    """Another host of an island, as its leader sees it."""

    name = Text(max_length=100)
    version = Whole(allow_null=True, default=None)
    phase = Text(max_length=20)
    reason = Text(allow_blank=True, max_length=8000, default="")


class Heartbeat(Body):
    """POST islands/{id}/heartbeat."""

    version = Whole(allow_null=True, default=None)
    digest = Pattern(HEX64, allow_null=True, allow_blank=True, default="")
    epoch = Whole(max_value=(1 << 31) - 1, allow_null=True, default=None)
    phase = Choice(Island.Phase.choices)
    reason = Text(allow_blank=True, allow_null=True, max_length=4000, default="")
    time = Real(allow_null=True, default=None, min_value=-1e12, max_value=1e12)
    active_requests = Whole(max_value=(1 << 31) - 1, allow_null=True, default=None)
    members = serializers.ListField(child=MemberHost(), max_length=256, default=list)
    # Absent from islands that know nothing of keys: then what was said before stands.
    alarm = Text(allow_blank=True, max_length=4000, required=False)
    trusted_keys = serializers.ListField(child=Pattern(HEX64), max_length=64, required=False)


class Report(Body):
    """POST islands/{id}/syncs."""

    from_version = Whole(allow_null=True, default=None)
    version = Whole()
    digest = Pattern(HEX64, allow_null=True, allow_blank=True, default="")
    outcome = Choice(SyncReport.Outcome.choices)
    verified = Flag(default=False)
    error = Text(allow_blank=True, allow_null=True, max_length=8000, default="")
    bytes = Whole(default=0)
    seconds = serializers.DictField(child=Real(), default=dict)
    route = serializers.ListField(child=Text(max_length=200), max_length=2000, default=list)

    def validate_seconds(self, value: dict[str, float]) -> dict[str, float]:
        """A handful of phases."""
        if len(value) > PHASES or any(len(name) > NAME for name in value):
            raise serializers.ValidationError(f"At most {PHASES} phases, with names of at most {NAME} characters.")
        return value


class Answer(Body):
    """POST islands/{id}/challenges/{c}."""

    version = Whole(allow_null=True, default=None)
    digest = Pattern(HEX64, allow_null=True, allow_blank=True, default="")
    answer = Pattern(HEX64, allow_null=True, allow_blank=True, default="")
    error = Text(allow_blank=True, allow_null=True, max_length=1000, default="")


class NewJob(Body):
    """POST jobs: replay or anchor of a version, verify of an island, merge of a stretch, collect of a run."""

    kind = Choice(list(OBJECTS))
    run = Slug(max_length=80, required=False)
    version = Whole(required=False)
    island = Identifier(required=False)
    to = Whole(required=False)

    def get_fields(self) -> dict[str, serializers.Field]:
        """`from` is a word of Python's."""
        return {**super().get_fields(), "from": Whole(required=False)}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Each kind names its object, and nothing else."""
        needed, given = OBJECTS[attrs["kind"]], attrs.keys() - {"kind"}
        if not needed <= given:
            raise serializers.ValidationError(f"A {attrs['kind']} job needs {' and '.join(sorted(needed))}.")
        if strange := sorted(given - needed):
            raise serializers.ValidationError(dict.fromkeys(strange, f"A {attrs['kind']} job takes no {strange[0]}."))
        return attrs
