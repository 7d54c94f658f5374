"""Anchors by reference: a ready version's full checkpoint that lies elsewhere, in a folder that islands can read or at
an address from which they can fetch it.

Nothing is read there: what is registered is a claim, and islands prove digests and state before they hold it. It must
never become what workers rebuild from, nor what retention counts on.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.db import IntegrityError, transaction

from controlplane.audit import services as audit
from controlplane.registry import submission
from controlplane.registry.errors import Missing, Refusal, Unacceptable
from controlplane.registry.models import Anchor, Run, Version
from mailboat.manifest import MANIFEST_TYPE, Envelope, Manifest

SCHEMES = ("file", "https", "http")


def register(run: Run, number: int, uri: str, files: Any, *, actor: str) -> tuple[Version, bool]:
    """Says where the checkpoint of version `number` lies; the second value is True when that is new.

    Raises Missing, Unacceptable `anchor_invalid`, Refusal `not_ready` and `anchor_exists`.
    """
    version = Version.objects.filter(run=run, number=number).first()
    if version is None:
        raise Missing(f"There is no version {number} in this run.")
    if version.state != Version.State.READY or version.envelope is None:
        raise Refusal(f"Version {number} is {version.state}; anchors are those of ready versions.", code="not_ready")
    _check(uri)
    manifest = Manifest.from_bytes(Envelope.from_dict(version.envelope).open(MANIFEST_TYPE))
    found = submission.anchor_files(files, manifest)
    size = sum(file.blob.size for file in found)
    if size < manifest.full_bytes:
        raise Unacceptable(
            f"The anchor can't be accepted: its files have {size:,} bytes, the version's tensors alone "
            f"{manifest.full_bytes:,}.",
            code="anchor_invalid",
        )
    facts = {"kind": Anchor.Kind.REFERENCE, "uri": uri, "files": [file.as_json() for file in found], "bytes": size}
    try:
        with transaction.atomic():
            Anchor.objects.create(version=version, **facts)
            audit.record(run.project, actor, "version.anchor", f"run {run.name} version {number}", after={"uri": uri})
    except IntegrityError:
        known = Anchor.objects.get(version=version)
        if (known.uri, known.files) != (uri, facts["files"]):
            raise Refusal(
                f"Version {number} has an anchor already, and anchors never change.", code="anchor_exists"
            ) from None
        return version, False
    return version, True


def _check(uri: str) -> None:
    try:
        address = urlsplit(uri)
        plain = not (address.query or address.fragment or address.username or address.password)
        sound = address.scheme in SCHEMES and plain and uri.isprintable() and not set(uri) & set(" \\")
        placed = (
            address.path.startswith("/") and not address.netloc if address.scheme == "file" else bool(address.hostname)
        )
    except ValueError:
        sound = placed = False
    if not (sound and placed) or ".." in address.path.split("/"):
        raise Unacceptable(
            "The anchor can't be accepted: its uri must be file:///FOLDER or https://HOST/FOLDER, without credentials, "
            "query and fragment.",
            code="anchor_invalid",
        )
