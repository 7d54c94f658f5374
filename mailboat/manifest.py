"""Manifest, head and envelope: the documents that define versions and point at them, as exact bytes.

A document is canonical JSON inside a DSSE envelope that can carry signatures; what is signed is the exact payload, so
nothing may ever be encoded again between publisher and island.  Formats: docs/format/manifest.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from mailboat import canonical
from mailboat.checkpoint.side_files import SideFile, parse_side_files
from mailboat.errors import ManifestError

MANIFEST_TYPE = "application/vnd.mailboat.manifest+json"
HEAD_TYPE = "application/vnd.mailboat.head+json"
MAX_DOCUMENT = 1 << 24
MAX_PARTS = 65_536
MAX_SIGNATURES = 16
_MANIFEST_FORMAT = "mailboat-manifest-1"
_HEAD_FORMAT = "mailboat-head-1"
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CHANNEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,255}")
_ENVELOPE_DEPTH = 8


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob by its SHA-256 (hex) and size in bytes."""

    sha256: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that documents carry."""
        return {"sha256": self.sha256, "size": self.size}


@dataclass(frozen=True, slots=True)
class ParentRef:
    """The version that a version's patch starts from: its number and state digest."""

    number: int
    state: str


@dataclass(frozen=True, slots=True)
class PatchRef:
    """The parts of the patch from the parent, in part order, and how many elements it changes."""

    parts: tuple[BlobRef, ...]
    changed: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version is. `elements` are coding elements, `full_bytes` the bytes of all tensors, `state` the state
    digest.

    `parent` and `patch` are null for a version that stands alone; a patch needs a parent. `step` is the trainer's own
    count.
    """

    run: str
    epoch: int
    number: int
    parent: ParentRef | None
    inventory: BlobRef
    digests: BlobRef
    side_files: tuple[SideFile, ...]
    state: str
    patch: PatchRef | None
    elements: int
    full_bytes: int
    step: int | None = None

    def to_bytes(self) -> bytes:
        """Return the exact bytes: canonical JSON."""
        patch = self.patch
        return canonical.encode(
            {
                "digests": self.digests.to_json(),
                "elements": self.elements,
                "epoch": self.epoch,
                "format": _MANIFEST_FORMAT,
                "full_bytes": self.full_bytes,
                "inventory": self.inventory.to_json(),
                "number": self.number,
                "parent": self.parent and {"number": self.parent.number, "state": self.parent.state},
                "patch": patch and {"changed": patch.changed, "parts": [part.to_json() for part in patch.parts]},
                "run": self.run,
                "side_files": [file.to_json() for file in self.side_files],
                "state": self.state,
                "step": self.step,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse exact bytes strictly; raise ManifestError for anything that `to_bytes` would not write."""
        fields = _Fields.parse(data, "The manifest", _MANIFEST_FORMAT, cls.__slots__)
        try:
            manifest = cls(
                run=fields.uuid("run"),
                epoch=fields.integer("epoch"),
                number=fields.integer("number"),
                parent=_parent(fields.optional("parent")),
                inventory=fields.blob("inventory"),
                digests=fields.blob("digests"),
                side_files=parse_side_files(fields.values["side_files"]),
                state=fields.digest("state"),
                patch=_patch(fields.optional("patch")),
                elements=fields.integer("elements"),
                full_bytes=fields.integer("full_bytes"),
                step=None if fields.values["step"] is None else fields.integer("step"),
            )
            manifest._check()
        except ValueError as problem:
            raise ManifestError(f"The manifest is not valid: {problem}.") from None
        return manifest

    def _check(self) -> None:
        if self.patch is not None and self.parent is None:
            raise ValueError("it has a patch but no parent")
        if self.parent is not None and self.parent.number >= self.number:
            raise ValueError("its number does not come after its parent's")
        if self.patch is not None and self.patch.changed > self.elements:
            raise ValueError("its patch changes more elements than there are")

    @property
    def sha256(self) -> str:
        """SHA-256 of the exact bytes, 64 hex digits: the name of the manifest's blob."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Head:
    """Where a channel points: version, manifest (SHA-256 of its bytes), state digest; `issued`, `expires` in Unix
    seconds.

    `serial` grows by one with every head of a channel, `generation` with every restore of the registry: an island never
    goes back in (generation, serial).
    """

    run: str
    channel: str
    version: int
    epoch: int
    manifest: str
    state: str
    generation: int
    serial: int
    issued: int
    expires: int

    def to_bytes(self) -> bytes:
        """Return the exact bytes: canonical JSON."""
        return canonical.encode({name: getattr(self, name) for name in self.__slots__} | {"format": _HEAD_FORMAT})

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        """Parse exact bytes strictly; raise ManifestError for anything that `to_bytes` would not write."""
        fields = _Fields.parse(data, "The head", _HEAD_FORMAT, cls.__slots__)
        try:
            numbers = ("version", "epoch", "generation", "serial", "issued", "expires")
            channel = fields.values["channel"]
            if not isinstance(channel, str) or not _CHANNEL.fullmatch(channel):
                raise ValueError("channel is not a channel's name")
            head = cls(
                run=fields.uuid("run"),
                channel=channel,
                manifest=fields.digest("manifest"),
                state=fields.digest("state"),
                **{name: fields.integer(name) for name in numbers},
            )
            if head.expires <= head.issued:
                raise ValueError("it expires before it is issued")
        except ValueError as problem:
            raise ManifestError(f"The head is not valid: {problem}.") from None
        return head


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature over `Envelope.pae()`: the key's id and the raw bytes."""

    keyid: str
    sig: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A DSSE envelope: exact payload bytes, their type, and any number of signatures (none is allowed)."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...] = ()

    @classmethod
    def wrap(cls, payload_type: str, payload: bytes, signatures: Sequence[Signature] = ()) -> Envelope:
        """Put exact bytes into an envelope."""
        return cls(payload_type, payload, tuple(signatures))

    def pae(self) -> bytes:
        """Return the DSSE version 1 pre-authentication encoding: what signatures are made over."""
        kind = self.payload_type.encode()
        return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(self.payload), self.payload)

    def to_dict(self) -> dict[str, Any]:
        """Return the envelope as JSON values."""
        return {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": self.payload_type,
            "signatures": [{"keyid": s.keyid, "sig": base64.b64encode(s.sig).decode()} for s in self.signatures],
        }

    def to_json(self) -> bytes:
        """Return the envelope as canonical JSON bytes."""
        return canonical.encode(self.to_dict())

    @classmethod
    def from_dict(cls, value: Any) -> Envelope:
        """Check JSON values and return their envelope; raise ManifestError."""
        try:
            if not isinstance(value, dict) or value.keys() != {"payload", "payloadType", "signatures"}:
                raise ValueError("it needs payload, payloadType and signatures, and nothing else")
            kind = value["payloadType"]
            if not isinstance(kind, str) or not _PRINTABLE.fullmatch(kind):
                raise ValueError("payloadType is not valid")
            signatures = value["signatures"]
            if not isinstance(signatures, list) or len(signatures) > MAX_SIGNATURES:
                raise ValueError("signatures is not a short list")
            return cls(kind, _base64(value["payload"]), tuple(_signature(item) for item in signatures))
        except ValueError as problem:
            raise ManifestError(f"The envelope is not valid: {problem}.") from None

    @classmethod
    def from_json(cls, data: bytes | str) -> Envelope:
        """Parse JSON text (any spelling: only the payload is exact); raise ManifestError."""
        raw = data.encode() if isinstance(data, str) else data
        try:
            if len(raw) > 2 * MAX_DOCUMENT or canonical.depth(raw) > _ENVELOPE_DEPTH:
                raise ValueError("it is too large or nested too deeply")
            value = json.loads(raw.decode(), object_pairs_hook=canonical.unique_pairs)
        except (ValueError, RecursionError) as problem:
            raise ManifestError(f"The envelope can't be read as JSON: {problem}.") from None
        return cls.from_dict(value)

    def open(self, payload_type: str) -> bytes:
        """Return the payload when it is of `payload_type`; raise ManifestError otherwise."""
        if self.payload_type != payload_type:
            raise ManifestError(f"The envelope holds {self.payload_type} where {payload_type} is needed.")
        return self.payload

    @property
    def payload_sha256(self) -> str:
        """SHA-256 of the exact payload, 64 hex digits."""
        return hashlib.sha256(self.payload).hexdigest()


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a document, with one checked getter per kind; each raises ValueError naming the field."""

    values: Mapping[str, Any]

    @classmethod
    def parse(cls, data: bytes, what: str, form: str, names: Sequence[str]) -> _Fields:
        values = canonical.decode(data, what=what, error=ManifestError, max_bytes=MAX_DOCUMENT)
        if not isinstance(values, dict) or values.keys() != {*names, "format"} or values["format"] != form:
            raise ManifestError(f"{what} does not have the fields of {form}.")
        return cls(values)

    def integer(self, name: str) -> int:
        value = self.values[name]
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is not a count")
        return value

    def digest(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str) or not _HEX64.fullmatch(value):
            raise ValueError(f"{name} is not a digest of 64 hex digits")
        return value

    def uuid(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str) or str(UUID(value)) != value:
            raise ValueError(f"{name} is not a UUID in lower case")
        return value

    def optional(self, name: str) -> _Fields | None:
        value = self.values[name]
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{name} is not an object")
        return _Fields(value)

    def only(self, *names: str) -> None:
        if self.values.keys() != set(names):
            raise ValueError(f"an object needs {', '.join(names)} and nothing else")

    def blob(self, name: str) -> BlobRef:
        return _blob(self.values[name])


def _blob(value: Any) -> BlobRef:
    if not isinstance(value, dict):
        raise ValueError("a blob is not an object")
    fields = _Fields(value)
    fields.only("sha256", "size")
    return BlobRef(fields.digest("sha256"), fields.integer("size"))


def _parent(fields: _Fields | None) -> ParentRef | None:
    if fields is None:
        return None
    fields.only("number", "state")
    return ParentRef(fields.integer("number"), fields.digest("state"))


def _patch(fields: _Fields | None) -> PatchRef | None:
    if fields is None:
        return None
    fields.only("changed", "parts")
    parts = fields.values["parts"]
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError("a patch needs at least one part")
    return PatchRef(tuple(_blob(part) for part in parts), fields.integer("changed"))


def _signature(value: Any) -> Signature:
    if not isinstance(value, dict) or value.keys() != {"keyid", "sig"} or not isinstance(value["keyid"], str):
        raise ValueError("a signature needs keyid and sig")
    return Signature(value["keyid"], _base64(value["sig"]))


def _base64(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("base64 text is missing")
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error:
        raise ValueError("base64 text is damaged") from None
    if base64.b64encode(raw).decode() != value:
        raise ValueError("base64 text is not canonical")
    return raw
