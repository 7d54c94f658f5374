"""What the control plane answers, as frozen data. Parsing is tolerant of fields that a newer server adds and strict
about those that are used; it must never guess a value that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mailboat.errors import ApiError
from mailboat.manifest import BlobRef, Envelope

Json = Mapping[str, Any]


def bad_reply(what: str) -> ApiError:
    """The error for an answer that does not follow the API: usually a proxy or another service at that address."""
    return ApiError(200, "bad_reply", f"The server's answer is not Mailboat's ({what}); check the server's address.")


def _get(body: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    value = body.get(key) if isinstance(body, Mapping) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise bad_reply(f"field {key!r}")
    return value


def _optional(body: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(body, Mapping):
        raise bad_reply(f"field {key!r}")
    return None if body.get(key) is None else _get(body, key, kind)


def _blob(body: Any) -> BlobRef:
    sha256 = _get(body, "sha256", str)
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise bad_reply("a blob's sha256")
    size = _get(body, "size", int)
    if size < 0:
        raise bad_reply("a blob's size")
    return BlobRef(sha256=sha256, size=size)


@dataclass(frozen=True, slots=True)
class ReadyVersion:
    """Number and state digest of a version that is ready."""

    number: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run: its UUID, its current epoch, the version that this goes on from, its newest ready version, and whether the
    next patch is to be small or, "speed", quick to apply.
    """

    id: str
    name: str
    epoch: int
    latest_ready: ReadyVersion | None
    epoch_from: int | None = None
    encode_next: Literal["size", "speed"] = "size"

    @classmethod
    def parse(cls, body: Any) -> RunInfo:
        """Reads the body of ``GET runs/{run}``."""
        ready = _optional(body, "latest_ready", Mapping)
        return cls(
            id=_get(body, "id", str),
            name=_get(body, "name", str),
            epoch=_get(_get(body, "epoch", Mapping), "number", int),
            epoch_from=_optional(_get(body, "epoch", Mapping), "from_version", int),
            latest_ready=ready and ReadyVersion(_get(ready, "number", int), _get(ready, "state_digest", str)),
            # A server of the release before says nothing of it, and one to come may know more ways than we do.
            encode_next="speed" if _optional(body, "encode_next", str) == "speed" else "size",
        )


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version as the server records it. ``state`` is its life cycle, ``state_digest`` its contents."""

    number: int
    epoch: int
    state: str
    reason: str
    state_digest: str | None
    manifest: str | None
    changed: int | None
    elements: int | None
    full_bytes: int | None
    patch_bytes: int | None
    job: str | None
    step: int | None = None

    @classmethod
    def parse(cls, body: Any) -> VersionInfo:
        """Reads one version."""
        manifest = _optional(body, "manifest", Mapping)
        job = body.get("job")
        return cls(
            number=_get(body, "number", int),
            epoch=_get(body, "epoch", int),
            state=_get(body, "state", str),
            reason=_optional(body, "reason", str) or "",
            state_digest=_optional(body, "state_digest", str) or None,
            manifest=manifest and _get(manifest, "sha256", str),
            changed=_optional(body, "changed", int),
            elements=_optional(body, "elements", int),
            full_bytes=_optional(body, "full_bytes", int),
            patch_bytes=_optional(body, "patch_bytes", int),
            job=None if job is None else str(job.get("id") if isinstance(job, Mapping) else job),
            step=_optional(body, "step", int),
        )


@dataclass(frozen=True, slots=True)
class AnchorFile:
    """One file of an anchor: POSIX path relative to the checkpoint folder, and the blob with its bytes."""

    path: str
    blob: BlobRef

    @classmethod
    def parse(cls, body: Any) -> AnchorFile:
        """Reads ``{path, sha256, size}``; a path that leaves the folder is refused."""
        path = _get(body, "path", str)
        parts = path.split("/")
        if not path or "\\" in path or "\0" in path or any(part in {"", ".", ".."} for part in parts):
            raise bad_reply("an anchor's path leaves its folder")
        return cls(path=path, blob=_blob(body))

    def as_json(self) -> dict[str, Any]:
        """The form in which the API carries it."""
        return {"path": self.path, "sha256": self.blob.sha256, "size": self.blob.size}


@dataclass(frozen=True, slots=True)
class AnchorStep:
    """Start from the full checkpoint of ``version``. ``uri`` names a folder outside of Mailboat where its files lie as
    well, or alone; empty: they are blobs of the run.
    """

    version: int
    manifest: str
    files: tuple[AnchorFile, ...]
    uri: str = ""


@dataclass(frozen=True, slots=True)
class PatchStep:
    """Go from version ``origin`` to version ``to`` by these parts."""

    origin: int
    to: int
    manifest: str
    parts: tuple[BlobRef, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A route. ``origin`` is the version held (None: nothing), ``bytes`` what travels. After ``wait_seconds`` a shorter
    one may be there, and waiting for it is sooner than walking (None: it is not).
    """

    origin: int | None
    to: int
    bytes: int
    steps: tuple[AnchorStep | PatchStep, ...]
    wait_seconds: float | None = None

    @classmethod
    def parse(cls, body: Any) -> Plan:
        """Reads the body of ``GET runs/{run}/plan``; a step of an unknown kind is refused, never skipped."""
        return cls(
            origin=_optional(body, "from", int),
            to=_get(body, "to", int),
            bytes=_get(body, "bytes", int),
            steps=tuple(_step(step) for step in _get(body, "steps", list)),
            wait_seconds=_optional(body, "wait_seconds", (int, float)),
        )


def _step(body: Any) -> AnchorStep | PatchStep:
    kind = _get(body, "kind", str)
    manifest = _get(body, "manifest", str)
    if kind == "anchor":
        files = tuple(AnchorFile.parse(file) for file in _get(body, "files", list))
        if len({file.path for file in files}) != len(files):
            raise bad_reply("an anchor names a file twice")
        return AnchorStep(_get(body, "version", int), manifest, files, _optional(body, "uri", str) or "")
    if kind == "patch":
        parts = tuple(_blob(part) for part in _get(body, "parts", list))
        return PatchStep(_get(body, "from", int), _get(body, "to", int), manifest, parts)
    raise bad_reply(f"a step of the unknown kind {kind!r}")


@dataclass(frozen=True, slots=True)
class TrustInfo:
    """Public keys (hex) with the envelope by which an older one vouches for them; revoked keys. A claim, no proof."""

    publishers: Mapping[str, Envelope | None]
    revoked: tuple[str, ...]
    heads: Mapping[str, Envelope | None]

    @classmethod
    def parse(cls, body: Any) -> TrustInfo:
        """Reads the body of ``GET runs/{run}/trust``."""
        return cls(
            publishers=_endorsed(_get(body, "publishers", list)),
            revoked=_public_keys(_get(body, "revoked", list)),
            heads=_endorsed(_get(body, "heads", list)),
        )


def _endorsed(items: list[Any]) -> dict[str, Envelope | None]:
    keys = _public_keys([_get(item, "public_key", str) for item in items])
    told = [_optional(item, "endorsement", Mapping) for item in items]
    return {key: None if said is None else Envelope.from_dict(said) for key, said in zip(keys, told, strict=True)}


@dataclass(frozen=True, slots=True)
class StandingKeys:
    """Public keys (hex): of publishers that count and of those that were revoked, and of heads. ``derived``: a worker
    publishes the run, whose key is not named here.
    """

    publishers: tuple[str, ...]
    revoked: tuple[str, ...]
    heads: tuple[str, ...]
    derived: bool

    @classmethod
    def parse(cls, body: Any) -> StandingKeys | None:
        """Reads ``keys``; None from an older control plane."""
        keys = _optional(body, "keys", Mapping)
        if keys is None:
            return None
        return cls(
            publishers=_public_keys(_get(keys, "publishers", list)),
            revoked=_public_keys(_get(keys, "revoked", list)),
            heads=_public_keys(_get(keys, "heads", list)),
            derived=_optional(keys, "derived", bool) is True,
        )


def _public_keys(items: Any) -> tuple[str, ...]:
    if not all(isinstance(item, str) and len(item) == 64 and set(item) <= set("0123456789abcdef") for item in items):
        raise bad_reply("a public key")
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an upload that goes straight into the blob store: an HTTP PUT of exactly these bytes to ``url``."""

    offset: int
    size: int
    url: str = field(repr=False)  # carries a credential

    @classmethod
    def parse(cls, body: Any) -> Part:
        """Reads one of the ``parts``."""
        return cls(_get(body, "offset", int), _get(body, "size", int), _get(body, "url", str))


@dataclass(frozen=True, slots=True)
class Upload:
    """Where an upload stands: ``exists`` needs no more bytes; else send from ``offset`` to upload ``id``, or the
    ``parts`` that are missing straight to the store (None: it takes none).
    """

    exists: bool
    id: str = ""
    offset: int = 0
    parts: tuple[Part, ...] | None = None

    @classmethod
    def parse(cls, body: Any) -> Upload:
        """Reads the body of ``POST runs/{run}/blobs``."""
        if _get(body, "exists", bool):
            return cls(exists=True)
        found = body.get("parts")
        parts = tuple(map(Part.parse, found)) if isinstance(found, list) else None
        return cls(exists=False, id=str(body.get("upload")), offset=_get(body, "offset", int), parts=parts)


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What an island gets for its one-time token."""

    island: str
    name: str
    credential: str
    run: str
    run_id: str
    channel: str
    heartbeat_seconds: float
    pending: bool = False  # an operator has to approve the island first
    keys: StandingKeys | None = None  # None from an older control plane

    @classmethod
    def parse(cls, body: Any) -> Enrolment:
        """Reads the body of ``POST islands/enrol``."""
        island = _get(body, "island", Mapping)
        return cls(
            island=str(island.get("id")),
            name=_get(island, "name", str),
            credential=_get(body, "credential", str),
            run=_get(body, "run", str),
            run_id=_get(body, "run_id", str),
            channel=_get(body, "channel", str),
            heartbeat_seconds=float(_get(body, "heartbeat_seconds", (int, float))),
            pending=_optional(body, "pending", bool) is True,
            keys=StandingKeys.parse(body),
        )


@dataclass(frozen=True, slots=True)
class IslandInfo:
    """What an island may ask about itself at any time: whether it still waits for an operator's approval."""

    id: str
    pending: bool

    @classmethod
    def parse(cls, body: Any) -> IslandInfo:
        """Reads the body of ``GET islands/{id}``."""
        return cls(id=_get(body, "id", str), pending=_optional(body, "pending", bool) is True)


@dataclass(frozen=True, slots=True)
class ChallengeCommand:
    """Prove possession: keyed BLAKE3 over ``ranges`` of (tensor index, byte offset, byte length)."""

    challenge: str
    version: int
    digest: str
    nonce: bytes
    ranges: tuple[tuple[int, int, int], ...]

    @classmethod
    def parse(cls, body: Any) -> ChallengeCommand:
        """Reads one challenge command."""
        try:
            nonce = bytes.fromhex(_get(body, "nonce", str))
            ranges = tuple((int(t), int(o), int(n)) for t, o, n in _get(body, "ranges", list))
        except (TypeError, ValueError):
            raise bad_reply("a challenge") from None
        return cls(str(body.get("challenge")), _get(body, "version", int), _get(body, "digest", str), nonce, ranges)


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Commands for the island, the next interval in seconds, whether it may follow a channel and which one (None: the
    one that it enrolled with), a new credential, and why it drains (None: it does not). ``unreported``: the control
    plane has no report of what the island says that it holds.
    """

    challenges: tuple[ChallengeCommand, ...]
    heartbeat_seconds: float
    enabled: bool
    channel: str | None = None
    credential: str | None = None
    drain: str | None = None
    keys: StandingKeys | None = None  # None from an older control plane
    unreported: bool = False  # so it is said by an older control plane

    @classmethod
    def parse(cls, body: Any) -> HeartbeatReply:
        """Reads a heartbeat's answer. Commands of kinds that this version does not know are left out."""
        commands = _get(body, "commands", list)
        known = [c for c in commands if isinstance(c, Mapping) and c.get("kind") == "challenge"]
        enabled, drain = _optional(body, "enabled", bool), _optional(body, "drain", Mapping)
        return cls(
            challenges=tuple(ChallengeCommand.parse(command) for command in known),
            heartbeat_seconds=float(_get(body, "heartbeat_seconds", (int, float))),
            enabled=enabled is not False,
            channel=_optional(body, "channel", str) or None,
            credential=_optional(body, "credential", str) or None,
            drain=None if drain is None else _optional(drain, "reason", str) or "",
            keys=StandingKeys.parse(body),
            unreported=_optional(body, "unreported", bool) is True,
        )
