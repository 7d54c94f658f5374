"""What lies beside the blobs, so that an island with read access can follow the store alone.

    runs/<run>/channels/<channel>.json  the channel's head
    runs/<run>/versions/<number>.json   the envelope of the version's manifest, as it was committed
    runs/<run>/anchors/<number>.json    the files of the version's anchor: [{path, sha256, size}, ...]
    runs/<run>/keys/<public key>.json   by which an older key of the publisher vouches for this one
    head-keys/<public key>.json         the same for head keys

Heads, versions and anchors are copies: the database holds the truth, they are written after the commit and put back
when they are lost; a store that is full or away is logged. Key documents live here alone: they prove themselves. It
must never write what the database has not committed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

import structlog
from django.db.models import Q

from controlplane.registry import blobs
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Anchor, Channel, Run, Version
from mailboat.errors import ManifestError
from mailboat.manifest import Envelope

log = structlog.get_logger(__name__)

AT_ONCE = 2000  # documents of one run that one pass puts back


def head_name(run: uuid.UUID, channel: str) -> str:
    """Where a channel's head lies."""
    return f"runs/{run}/channels/{channel}.json"


def version_name(run: uuid.UUID, number: int) -> str:
    """Where a version's manifest lies."""
    return f"runs/{run}/versions/{number}.json"


def anchor_name(run: uuid.UUID, number: int) -> str:
    """Where the files of a version's anchor are listed."""
    return f"runs/{run}/anchors/{number}.json"


def key_name(run: uuid.UUID | None, public_key: str) -> str:
    """Where a key document lies: of a run's publisher, or (None) of this control plane's heads."""
    return f"head-keys/{public_key}.json" if run is None else f"runs/{run}/keys/{public_key}.json"


def encoded(document: Any) -> bytes:
    """The bytes of a document as served: the same for the file, the answer and the ETag."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def write_head(channel: Channel) -> None:
    """Copies a channel's head, and first the version that it names."""
    channel.refresh_from_db(fields=["head_envelope", "version"])
    if channel.version is not None:
        write_version(channel.version)
        _write(head_name(channel.run_id, channel.name), channel.head_envelope)


def write_version(version: Version) -> None:
    """Copies what an island needs to plan a way to a version or from its anchor, unless it is retired."""
    if version.state == Version.State.RETIRED:
        return
    files = Anchor.objects.filter(version=version).exclude(kind=Anchor.Kind.REFERENCE).values_list("files", flat=True)
    for anchor in files:
        _write(anchor_name(version.run_id, version.number), anchor)
    _write(version_name(version.run_id, version.number), version.envelope)


def remove_versions(run: Run, numbers: Iterable[int]) -> None:
    """Retention has removed what these versions need; harmless when nothing is there."""
    for number in numbers:
        blobs.store().remove_document(version_name(run.pk, number))
        blobs.store().remove_document(anchor_name(run.pk, number))


def put_back() -> None:
    """Brings the copies of every run in line with the database: writes what is lost, removes what is retired."""
    for channel in Channel.objects.filter(version__isnull=False):
        if blobs.store().read_document(head_name(channel.run_id, channel.name)) is None:
            write_head(channel)
    for run in Run.objects.all():
        retired = Q(state=Version.State.RETIRED)  # an unpinned island's channel may still name it
        shown = Version.objects.filter(Q(state=Version.State.READY) | Q(channels__isnull=False) & ~retired, run=run)
        wanted = dict(shown.values_list("number", "pk"))
        anchored = Anchor.objects.filter(version__run=run).exclude(kind=Anchor.Kind.REFERENCE)
        anchors = set(anchored.filter(version__in=wanted.values()).values_list("version__number", flat=True))
        there, anchors_there = _numbers(run, "versions"), _numbers(run, "anchors")
        lost = sorted((wanted.keys() - there) | (anchors - anchors_there))[-AT_ONCE:]
        for version in Version.objects.filter(pk__in=[wanted[number] for number in lost]).iterator(100):
            write_version(version)
        for number in there - wanted.keys():
            blobs.store().remove_document(version_name(run.pk, number))
        for number in anchors_there - anchors:
            blobs.store().remove_document(anchor_name(run.pk, number))


def write_key(run: uuid.UUID | None, public_key: str, envelope: Envelope) -> None:
    """Keeps a key document. Raises what the store raises: it lies nowhere else."""
    blobs.store().write_document(key_name(run, public_key), encoded(envelope.to_dict()))


def read_key(run: uuid.UUID | None, public_key: str) -> Envelope | None:
    """The document by which another key vouches for this one; None when there is none that can be read."""
    data = blobs.store().read_document(key_name(run, public_key))
    try:
        return None if data is None else Envelope.from_json(data)
    except ManifestError:
        return None


def _numbers(run: Run, folder: str) -> set[int]:
    stems = (name.removesuffix(".json") for name in blobs.store().documents(f"runs/{run.pk}/{folder}/"))
    return {int(stem) for stem in stems if stem.isascii() and stem.isdecimal()}


def _write(name: str, document: Any) -> None:
    try:
        blobs.store().write_document(name, encoded(document))
    except (Refusal, OSError) as error:
        log.error("document not written beside the blobs", name=name, error=str(error))
