"""What the API answers, for the schema. `representations` makes these; tests compare the two with every example."""

from __future__ import annotations

from rest_framework import serializers as drf

from controlplane.api.people_answers import Orders
from controlplane.fleet.models import Island, SyncReport
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry.models import Run as RunRow
from controlplane.registry.models import Version as VersionRow


def page_of(kind: type[drf.Serializer]) -> type[drf.Serializer]:
    """A page of a list of these."""
    fields = {
        "__doc__": f"A page of {kind.__name__}.",
        "results": kind(many=True),
        "next": drf.CharField(allow_null=True, help_text="The cursor of the rows that follow; null on the last page."),
    }
    return type(f"{kind.__name__}Page", (drf.Serializer,), fields)


class Problem(drf.Serializer):
    """A refusal (RFC 9457); docs/api/problems.md lists the codes and what some of them carry besides."""

    type = drf.CharField()
    title = drf.CharField()
    status = drf.IntegerField()
    code = drf.CharField()
    detail = drf.CharField()


class BlobRef(drf.Serializer):
    """A blob by name and size."""

    sha256 = drf.CharField()
    size = drf.IntegerField()


class File(drf.Serializer):
    """A file of an anchor."""

    path = drf.CharField()
    sha256 = drf.CharField()
    size = drf.IntegerField()


class Name(drf.Serializer):
    """A blob by name."""

    sha256 = drf.CharField()


# Runs


class RunSettings(drf.Serializer):
    """What operators set; null stands for no limit and never."""

    announce = drf.ChoiceField(RunRow.Announce.choices)
    encode_for = drf.ChoiceField(RunRow.EncodeFor.choices)
    keep_versions = drf.IntegerField(allow_null=True)
    keep_days = drf.IntegerField(allow_null=True)
    anchor_every = drf.IntegerField(allow_null=True)
    merge_up_to = drf.IntegerField()
    staleness_versions = drf.IntegerField(allow_null=True)
    staleness_seconds = drf.IntegerField(allow_null=True)


class EpochNumber(drf.Serializer):
    """An epoch by its number, and the version that it goes on from."""

    number = drf.IntegerField()
    from_version = drf.IntegerField(allow_null=True)


class ReadyVersion(drf.Serializer):
    """A version that islands may hold."""

    number = drf.IntegerField()
    state_digest = drf.CharField()


class Run(drf.Serializer):
    """A run and where it stands."""

    id = drf.UUIDField()
    name = drf.CharField()
    served_format = drf.CharField()
    source = drf.CharField(allow_null=True)  # type: ignore[assignment]  # a field of the document
    quantiser = drf.DictField(allow_null=True)
    announce = drf.ChoiceField(RunRow.Announce.choices)
    settings = RunSettings()
    epoch = EpochNumber()
    latest_ready = ReadyVersion(allow_null=True)
    created_at = drf.DateTimeField()


class RunInFull(Run):
    """And what the publisher is to encode the next patch for."""

    encode_next = drf.ChoiceField(("size", "speed"))


class Epoch(drf.Serializer):
    """A stretch of a run without a rewind."""

    number = drf.IntegerField()
    from_version = drf.IntegerField(allow_null=True)
    from_state = drf.CharField(allow_null=True)
    reason = drf.CharField(allow_blank=True)
    created_at = drf.DateTimeField()


class Channel(drf.Serializer):
    """Where a channel points."""

    run = drf.CharField()
    channel = drf.CharField()
    version = drf.IntegerField(allow_null=True)
    state_digest = drf.CharField(allow_null=True)
    serial = drf.IntegerField()
    generation = drf.IntegerField()
    protected = drf.BooleanField()
    expires_at = drf.DateTimeField(allow_null=True)


# Blobs


class Part(drf.Serializer):
    """A stretch of an upload to PUT straight to the blob store."""

    index = drf.IntegerField()
    offset = drf.IntegerField()
    size = drf.IntegerField()
    url = drf.CharField()


class BlobStanding(drf.Serializer):
    """Whether the run has a blob; if not, the upload to feed, where it stands, and its parts that are missing."""

    exists = drf.BooleanField()
    upload = drf.UUIDField(required=False)
    offset = drf.IntegerField(required=False)
    parts = Part(many=True, required=False)
    joining = drf.BooleanField(required=False)


# Versions


class Parent(drf.Serializer):
    """The version that a patch starts from."""

    number = drf.IntegerField()
    state = drf.CharField(allow_null=True)


class VersionInShort(drf.Serializer):
    """A version in a list: the same size however many tensors and files it has."""

    number = drf.IntegerField()
    epoch = drf.IntegerField()
    state = drf.ChoiceField(VersionRow.State.choices)
    reason = drf.CharField(allow_blank=True)
    state_digest = drf.CharField(allow_null=True)
    parent = Parent(allow_null=True)
    manifest = Name(allow_null=True)
    inventory = Name(allow_null=True)
    digests = Name(allow_null=True)
    statistics = BlobRef(allow_null=True)
    elements = drf.IntegerField(allow_null=True)
    changed = drf.IntegerField(allow_null=True)
    unit_steps = drf.IntegerField(allow_null=True)
    full_bytes = drf.IntegerField(allow_null=True)
    patch_bytes = drf.IntegerField(allow_null=True)
    anchored = drf.BooleanField()
    step = drf.IntegerField(allow_null=True)
    published_by = drf.CharField()
    committed_at = drf.DateTimeField()
    ready_at = drf.DateTimeField(allow_null=True)
    job = drf.UUIDField(allow_null=True)


class PatchFiles(drf.Serializer):
    """The parts of a step patch."""

    parts = BlobRef(many=True)


class AnchorFiles(drf.Serializer):
    """A full checkpoint: `upload` and `built` are blobs of the run, a `reference` lies at `uri`."""

    kind = drf.ChoiceField(["upload", "built", "reference"])
    uri = drf.CharField(allow_blank=True)
    files = File(many=True)


class Version(VersionInShort):
    """A version with the files that it is made of."""

    patch = PatchFiles(allow_null=True)
    anchor = AnchorFiles(allow_null=True)


class Signature(drf.Serializer):
    """A signature of an envelope."""

    keyid = drf.CharField(allow_blank=True)
    sig = drf.CharField()


class Envelope(drf.Serializer):
    """A DSSE envelope; docs/format/manifest.md describes the payloads."""

    payloadType = drf.CharField()  # noqa: N815  DSSE's name
    payload = drf.CharField()
    signatures = Signature(many=True)


class PlanStep(drf.Serializer):
    """One step of a route: an anchor (`version`, `files`, perhaps `uri`) or a patch (`via`, `from`, `to`, `parts`)."""

    kind = drf.ChoiceField(["anchor", "patch"])
    via = drf.ChoiceField(["step", "merged", "reverse"], required=False)
    bytes = drf.IntegerField()
    seconds = drf.FloatField()
    uri = drf.CharField(required=False)
    manifest = drf.CharField()
    version = drf.IntegerField(required=False)
    files = File(many=True, required=False)
    to = drf.IntegerField(required=False)
    parts = BlobRef(many=True, required=False)

    def get_fields(self) -> dict[str, drf.Field]:
        """`from` is a word of Python's."""
        return {**super().get_fields(), "from": drf.IntegerField(required=False)}


class Building(drf.Serializer):
    """A patch that would bring the caller to the version sooner than the route; `job`: null, nobody builds it."""

    job = drf.UUIDField(allow_null=True)
    to = drf.IntegerField()
    bytes = drf.IntegerField()
    seconds = drf.FloatField()

    def get_fields(self) -> dict[str, drf.Field]:
        """`from` is a word of Python's."""
        return {**super().get_fields(), "from": drf.IntegerField()}


class Plan(drf.Serializer):
    """A route from what is held to a version, and what to wait for instead, where that is sooner."""

    to = drf.IntegerField()
    bytes = drf.IntegerField()
    seconds = drf.FloatField()
    building = Building(required=False)
    wait_seconds = drf.FloatField(required=False, allow_null=True)
    steps = PlanStep(many=True)

    def get_fields(self) -> dict[str, drf.Field]:
        """`from` is a word of Python's."""
        return {"from": drf.IntegerField(allow_null=True), **super().get_fields()}


# Jobs


class Event(drf.Serializer):
    """A line of a job's log."""

    at = drf.DateTimeField()
    level = drf.ChoiceField(JobEvent.Level.choices)
    message = drf.CharField(allow_blank=True)


class JobInShort(drf.Serializer):
    """Background work."""

    id = drf.UUIDField()
    kind = drf.ChoiceField(Job.Kind.choices)
    run = drf.CharField(allow_null=True)
    state = drf.ChoiceField(Job.State.choices)
    params = drf.DictField()
    attempt = drf.IntegerField()
    waiting_for = drf.CharField(allow_null=True)
    rerun_of = drf.UUIDField(allow_null=True)
    owner = drf.CharField(allow_null=True)
    done = drf.IntegerField()
    total = drf.IntegerField(allow_null=True)
    unit = drf.CharField(allow_blank=True)
    result = drf.DictField(allow_null=True)
    error = drf.CharField(allow_null=True)
    requested_by = drf.CharField()
    queued_at = drf.DateTimeField()
    started_at = drf.DateTimeField(allow_null=True)
    finished_at = drf.DateTimeField(allow_null=True)


class JobInFull(JobInShort):
    """Background work with its log."""

    events = Event(many=True)


# Islands


class Said(drf.Serializer):
    """A derived state and the sentence that explains it."""

    state = drf.CharField()
    reason = drf.CharField(allow_blank=True)


class Skew(drf.Serializer):
    """How far behind its channel."""

    versions = drf.IntegerField(allow_null=True)
    seconds = drf.IntegerField(allow_null=True)


class Claim(drf.Serializer):
    """What the island says, unchecked."""

    version = drf.IntegerField(allow_null=True)
    digest = drf.CharField(allow_null=True)
    epoch = drf.IntegerField(allow_null=True)


class MemberLine(drf.Serializer):
    """Another host of an island, by its leader's last heartbeat."""

    name = drf.CharField()
    version = drf.IntegerField(allow_null=True)
    phase = drf.CharField()
    reason = drf.CharField(allow_blank=True)


class IslandLine(Orders):
    """A line of the fleet table."""

    id = drf.UUIDField()
    name = drf.CharField()
    run = drf.CharField()
    channel = drf.CharField()
    provider = drf.CharField(allow_blank=True)
    region = drf.CharField(allow_blank=True)
    engine = drf.CharField(allow_blank=True)
    agent_version = drf.CharField(allow_blank=True)
    enabled = drf.BooleanField()
    health = Said()
    sync = Said()
    phase = drf.ChoiceField(Island.Phase.choices)
    version = drf.IntegerField(allow_null=True)
    target = drf.IntegerField(allow_null=True)
    skew = Skew()
    claimed = Claim()
    members = MemberLine(many=True)
    trusted_keys = drf.ListField(
        child=drf.CharField(), help_text="Publishers' public keys without which it goes nowhere."
    )
    alarm = drf.CharField(allow_null=True, help_text="What it refused as forged, replayed or expired.")
    alarm_at = drf.DateTimeField(allow_null=True)
    last_patch_bytes = drf.IntegerField(allow_null=True)
    last_seconds = drf.DictField(allow_null=True)
    last_seen_at = drf.DateTimeField(allow_null=True)
    last_sync_at = drf.DateTimeField(allow_null=True)


class Fleet(drf.Serializer):
    """The fleet at a glance."""

    islands = IslandLine(many=True)
    counts = drf.DictField(child=drf.DictField(child=drf.IntegerField()))
    head = drf.DictField(child=Channel())


class Sync(drf.Serializer):
    """A sync as it was reported and judged."""

    from_version = drf.IntegerField(allow_null=True)
    version = drf.IntegerField()
    digest = drf.CharField(allow_null=True)
    outcome = drf.ChoiceField(SyncReport.Outcome.choices)
    accepted = drf.BooleanField()
    bytes = drf.IntegerField()
    seconds = drf.DictField()
    error = drf.CharField(allow_null=True)
    reported_at = drf.DateTimeField()


class StandingDrain(drf.Serializer):
    """The order to take no new requests."""

    seconds_left = drf.FloatField()
    reason = drf.CharField(allow_blank=True)


class StandingKeys(drf.Serializer):
    """Public keys, 64 hex digits each: those of the run's publishers, revoked ones, those that sign heads."""

    publishers = drf.ListField(child=drf.CharField())
    derived = drf.BooleanField()  # a worker publishes the run; its key has to be given to an island by name
    revoked = drf.ListField(child=drf.CharField())
    heads = drf.ListField(child=drf.CharField())


class Commands(drf.Serializer):
    """The answer to a heartbeat."""

    commands = drf.ListField(child=drf.DictField())
    heartbeat_seconds = drf.IntegerField()
    enabled = drf.BooleanField()
    channel = drf.CharField(help_text="The one to follow: its own while the island is pinned.")
    drain = StandingDrain(allow_null=True)
    credential = drf.CharField(allow_null=True, help_text="A new one, to be tried beside the old one.")
    keys = StandingKeys()
    unreported = drf.BooleanField(help_text="No report of what the island holds is known: it sends it again.")


class Challenge(drf.Serializer):
    """A question that was answered."""

    challenge = drf.UUIDField()
    state = drf.CharField()


class EnrolmentToken(drf.Serializer):
    """A one-time token, shown once."""

    id = drf.IntegerField()
    token = drf.CharField()
    command = drf.CharField()
    expires_at = drf.DateTimeField()


class IslandName(drf.Serializer):
    """An island by key and name."""

    id = drf.UUIDField()
    name = drf.CharField()


class Enrolment(drf.Serializer):
    """What an island needs to begin."""

    island = IslandName()
    credential = drf.CharField()
    run = drf.CharField()
    run_id = drf.UUIDField()
    channel = drf.CharField()
    heartbeat_seconds = drf.IntegerField()
    pending = drf.BooleanField(help_text="Whether an operator has to approve the island first.")
    keys = StandingKeys()
