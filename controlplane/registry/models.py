"""Rows of what was published.

version: committed -> [building ->] validating -> ready -> retired; any of the first three -> failed. Only
`registry.services` changes a state, by one conditional UPDATE. What a version says (number, parent, digests) never
changes once it is written; a version that a worker builds gets these once, when it leaves `building`.
"""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

SHA256 = r"^[0-9a-f]{64}$"


class Project(models.Model):
    """The tenant: everything belongs to one."""

    slug = models.SlugField(max_length=50, unique=True)
    name = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.slug


class Run(models.Model):
    """One training lineage: a model, a served format, a series of versions."""

    class Announce(models.TextChoices):
        """When the channel `latest` moves."""

        VALIDATED = "validated"
        COMMITTED = "committed"  # at once; the validation follows, and a failed one takes the head back

    class EncodeFor(models.TextChoices):
        """What the step patches are encoded for."""

        SIZE = "size"
        LINK = "link"  # the links of the run's islands: `fleet.encoding` chooses, version by version

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="runs")
    name = models.SlugField(max_length=80)
    served_format = models.CharField(max_length=40, default="bf16")
    announce = models.CharField(max_length=12, choices=Announce.choices, default=Announce.VALIDATED)
    encode_for = models.CharField(max_length=4, choices=EncodeFor.choices, default=EncodeFor.SIZE)
    # Settings; null stands for "no limit" and "never". `registry.steering` writes them.
    keep_versions = models.PositiveIntegerField(null=True)
    keep_days = models.PositiveIntegerField(null=True)
    anchor_every = models.PositiveIntegerField(null=True)
    merge_up_to = models.PositiveIntegerField(default=256)  # longest aligned span merged ahead of need; 0: none
    staleness_versions = models.PositiveIntegerField(null=True)
    staleness_seconds = models.PositiveIntegerField(null=True)
    revision = models.PositiveBigIntegerField(default=1)  # raised by every edit of the settings
    # A derived run serves another run's versions in another format; a worker publishes them, number for number.
    source = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="derived")
    quantiser = models.JSONField(null=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """Names are unique within a project; a limit of nothing is no limit."""

        constraints = [
            models.UniqueConstraint(fields=["project", "name"], name="run_name_once"),
            models.CheckConstraint(
                condition=~Q(keep_versions=0) & ~Q(keep_days=0) & ~Q(anchor_every=0), name="run_limits_are_positive"
            ),
            models.CheckConstraint(
                condition=Q(source__isnull=True, quantiser__isnull=True)
                | Q(source__isnull=False, quantiser__isnull=False),
                name="run_derived_has_quantiser",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Inventory(models.Model):
    """The tensors of an epoch; the document itself is a blob of the run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="inventories")
    sha256 = models.CharField(max_length=64)
    tensors = models.BigIntegerField()
    elements = models.BigIntegerField()
    full_bytes = models.BigIntegerField()

    class Meta:
        """One row per document and run."""

        constraints = [
            models.UniqueConstraint(fields=["run", "sha256"], name="inventory_once"),
            models.CheckConstraint(condition=Q(sha256__regex=SHA256), name="inventory_sha256_is_hex"),
        ]
        verbose_name_plural = "inventories"

    def __str__(self) -> str:
        return self.sha256[:12]


class Blob(models.Model):
    """Immutable bytes named by their SHA-256, inside one run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="blobs")
    sha256 = models.CharField(max_length=64)
    size = models.BigIntegerField()
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """One row per name and run."""

        constraints = [
            models.UniqueConstraint(fields=["run", "sha256"], name="blob_once"),
            models.CheckConstraint(condition=Q(sha256__regex=SHA256), name="blob_sha256_is_hex"),
        ]

    def __str__(self) -> str:
        return self.sha256[:12]


class Upload(models.Model):
    """A blob on its way. The bytes that arrived are a file of the blob store; its length is the true offset."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="uploads")
    sha256 = models.CharField(max_length=64)
    size = models.BigIntegerField()
    offset = models.BigIntegerField(default=0)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """One upload per blob and run: a second publisher continues it."""

        constraints = [
            models.UniqueConstraint(fields=["run", "sha256"], name="upload_once"),
            models.CheckConstraint(condition=Q(sha256__regex=SHA256), name="upload_sha256_is_hex"),
        ]

    def __str__(self) -> str:
        return f"{self.sha256[:12]} at {self.offset}"


class Epoch(models.Model):
    """A stretch of a run without a rewind."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="epochs")
    number = models.PositiveIntegerField()
    from_version = models.ForeignKey("Version", on_delete=models.PROTECT, null=True, related_name="epochs_begun")
    from_state = models.CharField(max_length=64, blank=True)  # what the trainer resumed from; may match no version
    reason = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """Numbered from 0 within the run."""

        constraints = [models.UniqueConstraint(fields=["run", "number"], name="epoch_number_once")]
        ordering = ["run", "number"]

    def __str__(self) -> str:
        return f"{self.run} epoch {self.number}"


class Version(models.Model):
    """One immutable state of the served weights: number, state digest, parent."""

    class State(models.TextChoices):
        """Where the version stands."""

        COMMITTED = "committed"
        BUILDING = "building"
        VALIDATING = "validating"
        READY = "ready"
        RETIRED = "retired"
        FAILED = "failed"

    IN_FLIGHT = (State.COMMITTED, State.BUILDING, State.VALIDATING)

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="versions")
    epoch = models.ForeignKey(Epoch, on_delete=models.PROTECT, related_name="versions")
    number = models.BigIntegerField()
    # Of a derived run: the version of its source that this one serves in another format.
    source = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="derived")
    parent = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="children")
    state = models.CharField(max_length=12, choices=State.choices, default=State.COMMITTED)
    reason = models.TextField(blank=True)
    state_digest = models.CharField(max_length=64, blank=True)
    inventory = models.ForeignKey(Inventory, on_delete=models.PROTECT, null=True, related_name="versions")
    manifest_sha256 = models.CharField(max_length=64, blank=True)
    digests_sha256 = models.CharField(max_length=64, blank=True)
    envelope = models.JSONField(null=True)
    step = models.BigIntegerField(null=True)
    changed = models.BigIntegerField(null=True)
    elements = models.BigIntegerField(null=True)
    full_bytes = models.BigIntegerField(null=True)
    patch_bytes = models.BigIntegerField(null=True)
    side_files = models.JSONField(default=list)
    checkpoint_path = models.TextField(blank=True)
    published_by = models.CharField(max_length=120)
    job = models.ForeignKey("jobs.Job", on_delete=models.SET_NULL, null=True, related_name="versions")
    # Derived: changes per tensor, columns in one blob (docs/format/statistics.md). Written once, by the validation.
    statistics = models.ForeignKey(Blob, on_delete=models.PROTECT, null=True, related_name="+")
    unit_steps = models.BigIntegerField(null=True)  # their sum; it outlives the blob
    committed_at = models.DateTimeField(db_default=Now())
    ready_at = models.DateTimeField(null=True)
    retired_at = models.DateTimeField(null=True)

    class Meta:
        """Numbers never repeat within a run."""

        ordering = ["run", "number"]
        constraints = [
            models.UniqueConstraint(fields=["run", "number"], name="version_number_once"),
            models.CheckConstraint(condition=Q(number__gte=0), name="version_number_from_zero"),
            models.CheckConstraint(
                condition=~Q(state__in=["ready", "retired"])
                | (Q(state_digest__regex=SHA256) & Q(manifest_sha256__regex=SHA256)),
                name="version_ready_is_complete",
            ),
            models.CheckConstraint(
                condition=(Q(state_digest="") | Q(state_digest__regex=SHA256))
                & (Q(manifest_sha256="") | Q(manifest_sha256__regex=SHA256))
                & (Q(digests_sha256="") | Q(digests_sha256__regex=SHA256)),
                name="version_digests_are_hex",
            ),
            models.UniqueConstraint(
                fields=["run", "manifest_sha256"], condition=~Q(manifest_sha256=""), name="version_manifest_once"
            ),
        ]
        indexes = [models.Index(fields=["run", "state_digest"], name="version_by_digest")]

    def __str__(self) -> str:
        return f"{self.run} version {self.number}"


class Patch(models.Model):
    """What turns one version into another."""

    class Kind(models.TextChoices):
        """How the two versions lie to each other."""

        STEP = "step"  # between neighbours, the publisher's own
        MERGED = "merged"  # over several versions; made by a worker
        REVERSE = "reverse"  # back to an older version; made by a worker

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="patches")
    from_version = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="patches_out")
    to_version = models.ForeignKey(Version, on_delete=models.PROTECT, related_name="patches_in")
    kind = models.CharField(max_length=8, choices=Kind.choices, default=Kind.STEP)
    bytes = models.BigIntegerField()
    changed = models.BigIntegerField(null=True)
    codecs = models.CharField(max_length=80, blank=True)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        """One patch per pair and kind."""

        constraints = [
            models.UniqueConstraint(fields=["from_version", "to_version", "kind"], name="patch_once"),
            models.UniqueConstraint(fields=["to_version"], condition=Q(kind="step"), name="patch_one_step"),
        ]
        verbose_name_plural = "patches"

    def __str__(self) -> str:
        return f"patch {self.from_version_id} to {self.to_version_id}"


class PatchPart(models.Model):
    """One file of a patch."""

    patch = models.ForeignKey(Patch, on_delete=models.CASCADE, related_name="parts")
    index = models.PositiveIntegerField()
    blob = models.ForeignKey(Blob, on_delete=models.PROTECT, related_name="+")

    class Meta:
        """In order."""

        ordering = ["patch", "index"]
        constraints = [models.UniqueConstraint(fields=["patch", "index"], name="patch_part_once")]

    def __str__(self) -> str:
        return f"part {self.index}"


class Anchor(models.Model):
    """A full checkpoint of one version: blobs of the run, or files that lie elsewhere under `uri`."""

    class Kind(models.TextChoices):
        """Where the bytes came from."""

        UPLOAD = "upload"
        BUILT = "built"  # by a worker
        REFERENCE = "reference"

    version = models.OneToOneField(Version, on_delete=models.CASCADE, related_name="anchor")
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.UPLOAD)
    uri = models.TextField(blank=True)
    files = models.JSONField()
    bytes = models.BigIntegerField()

    def __str__(self) -> str:
        return f"anchor of {self.version}"


class Channels(models.QuerySet["Channel"]):
    """Channels by what they are for."""

    def needing(self) -> Channels:
        """Those that need their version: all but the ones of islands that were unpinned or removed. Of such a one only
        the serial counts, which must never be given out twice.
        """
        return self.filter(~Q(name__startswith=Channel.PINS) | Q(pinned_island__isnull=False), version__isnull=False)


class Channel(models.Model):
    """A named pointer to a version, with the head document that announces it."""

    LATEST = "latest"
    PINS = "island-"  # channels with such names pin one island (fleet.pins)
    objects = Channels.as_manager()

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="channels")
    name = models.SlugField(max_length=40)
    version = models.ForeignKey(Version, on_delete=models.PROTECT, null=True, related_name="channels")
    serial = models.BigIntegerField(default=0)
    generation = models.PositiveIntegerField(default=1)
    head_envelope = models.JSONField(null=True)
    expires_at = models.DateTimeField(null=True)
    protected = models.BooleanField(default=False)  # moves by an operator's hand alone
    revision = models.PositiveBigIntegerField(default=1)  # raised by every move and edit, not by a renewed expiry

    class Meta:
        """A channel that points somewhere has a head."""

        constraints = [
            models.UniqueConstraint(fields=["run", "name"], name="channel_once"),
            models.CheckConstraint(
                condition=Q(version__isnull=True, serial=0)
                | Q(version__isnull=False, serial__gt=0, head_envelope__isnull=False),
                name="channel_head_complete",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.run}/{self.name}"


class RunKey(models.Model):
    """A publisher's Ed25519 public key. Once a run has one, commits need the signature of one that is not revoked."""

    class Kind(models.TextChoices):
        """Whose key it is."""

        PUBLISHER = "publisher"
        DERIVED = "derived"  # of the worker that quantises; islands have to opt in to it

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="keys")
    kind = models.CharField(max_length=10, choices=Kind.choices, default=Kind.PUBLISHER)
    public_key = models.CharField(max_length=64)
    name = models.CharField(max_length=80)
    created_by = models.CharField(max_length=120)
    created_at = models.DateTimeField(db_default=Now())
    revoked_at = models.DateTimeField(null=True)
    revoked_by = models.CharField(max_length=120, blank=True)
    revoked_reason = models.CharField(max_length=300, blank=True)

    class Meta:
        """A key that was revoked never comes back."""

        ordering = ["created_at", "id"]
        constraints = [
            models.UniqueConstraint(fields=["run", "public_key"], name="run_key_once"),
            models.CheckConstraint(condition=Q(public_key__regex=SHA256), name="run_key_is_hex"),
        ]

    def __str__(self) -> str:
        return f"{self.run} key {self.name}"


class VersionLease(models.Model):
    """Somebody needs a version (and a route to it) until `expires_at`: retention leaves it alone."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="leases")
    version = models.ForeignKey(Version, on_delete=models.CASCADE, related_name="leases")
    holder = models.CharField(max_length=120)
    reason = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()

    class Meta:
        """One per holder and version."""

        constraints = [models.UniqueConstraint(fields=["version", "holder"], name="version_lease_once")]

    def __str__(self) -> str:
        return f"lease of {self.version} for {self.holder}"


class Tombstone(models.Model):
    """A blob that retention removed. The row comes with the removal of the blob's row; its file goes afterwards
    (`cleared_at`), so that a kill between the two leaves nothing behind for ever.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tombstones")
    sha256 = models.CharField(max_length=64)
    size = models.BigIntegerField()
    job = models.ForeignKey("jobs.Job", on_delete=models.SET_NULL, null=True, related_name="tombstones")
    removed_at = models.DateTimeField(db_default=Now())
    cleared_at = models.DateTimeField(null=True)

    class Meta:
        """The ones whose files are still there are looked for by every collection."""

        indexes = [
            models.Index(fields=["run", "sha256"], name="tombstone_by_blob"),
            models.Index(fields=["run"], condition=Q(cleared_at__isnull=True), name="tombstone_uncleared"),
        ]

    def __str__(self) -> str:
        return f"tombstone of {self.sha256[:12]}"
