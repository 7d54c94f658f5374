"""The blob store alone: while the control plane can't be reached, heads, plans, manifests and blobs come from there.

Nothing is believed here that is not believed of the control plane: heads and manifests have to be signed, blobs to have
their digests, states to be proven. The names in the store are those of `controlplane.registry.beside`. It must never
write there, and never answer for a control plane that says no: only one that is away has a stand-in.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from urllib3.response import BaseHTTPResponse, HTTPResponse

from mailboat.client import Api, Head
from mailboat.errors import ApiError, Conflict, MailboatError, ManifestError, NotFound, Unreachable
from mailboat.manifest import MANIFEST_TYPE, Envelope, Manifest
from mailboat.patience import TRANSIENT
from mailboat.replies import AnchorFile, AnchorStep, PatchStep, Plan, VersionInfo
from mailboat.signing import PUBLISHER

POLL_SECONDS = 5.0  # between looks at a head that nobody announces
MAX_DOCUMENT = 64 << 20
LONGEST_WALK = 100_000  # versions
OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")

T = TypeVar("T")
Files = tuple[AnchorFile, ...]


class Bucket(Protocol):
    """Read access to a blob store."""

    def open(self, name: str, start: int) -> BaseHTTPResponse:
        """The object from byte ``start`` on, as an HTTP answer 200, 206 or 416. Raises NotFound, Unreachable,
        ApiError.
        """


def bucket_at(url: str, api: Api) -> Bucket:
    """The store at ``file:///FOLDER``, ``http(s)://...`` or an object store's address. Raises MailboatError."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path:
        return FolderBucket(Path(unquote(parts.path)))
    if parts.scheme in {"http", "https"} and parts.hostname:
        return WebBucket(api, url.rstrip("/"))
    if parts.scheme in OBJECT_STORES and parts.netloc:
        return ObjectBucket(url)
    raise MailboatError(f"{url!r} is no blob store; write file:///FOLDER, https://HOST/PATH or s3://BUCKET/PREFIX.")


class FolderBucket:
    """A folder: the control plane's own, or a copy or mount of it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str, start: int) -> BaseHTTPResponse:
        """The file from byte ``start`` on."""
        try:
            file = (self._root / name).open("rb")
        except FileNotFoundError:
            raise _missing(name) from None
        except OSError as error:
            raise Unreachable(f"The blob store {self._root} can't be read ({error.strerror or error}).") from error
        size = file.seek(0, io.SEEK_END)
        file.seek(start)
        return _answer(file, start, size)


class WebBucket:
    """A store behind plain HTTP: a public bucket, a static server, a cache."""

    def __init__(self, api: Api, url: str) -> None:
        self._api = api
        self._url = url

    def open(self, name: str, start: int) -> BaseHTTPResponse:
        """The address below the store's."""
        try:
            return self._api.open_elsewhere(f"{self._url}/{name}", start=start)
        except ApiError as error:
            if error.status in {403, 404, 410}:  # a bucket that may not be listed says 403 of what is not there
                raise _missing(name) from error
            raise


class ObjectBucket:
    """S3 and what speaks like it, Google Cloud Storage, Azure; needs `mailboat[s3]`.

    Credentials come from the client's usual variables; its settings may stand in the address: ``?endpoint=...``.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise MailboatError(
                "Reading an object store needs one more package: pip install 'mailboat[s3]'."
            ) from error
        parts = urlsplit(url)
        config: Any = dict(parse_qsl(parts.query))
        options: Any = {"allow_http": True} if config.get("endpoint", "").startswith("http://") else {}
        address = parts._replace(query="", fragment="").geturl()
        self._obstore: Any = obstore
        self._store: Any = from_url(address, config=config, client_options=options)

    def open(self, name: str, start: int) -> BaseHTTPResponse:
        """The object from byte ``start`` on."""
        try:
            size = int(self._obstore.head(self._store, name)["size"])
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError):
            raise _missing(name) from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise Unreachable(f"The blob store can't be read ({type(error).__name__}).") from error
        return _answer(io.BufferedReader(_Ranges(self._obstore, self._store, name, start, size), 1 << 20), start, size)


class _Ranges(io.RawIOBase):
    """An object as a file that is read onwards."""

    def __init__(self, client: Any, store: Any, name: str, start: int, size: int) -> None:
        self._client, self._from, self._name, self._at, self._size = client, store, name, start, size

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes."""
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        try:
            data = bytes(self._client.get_range(self._from, self._name, start=self._at, end=end))
        except self._client.exceptions.BaseError as error:
            raise OSError(f"the blob store broke off ({type(error).__name__})") from error
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _answer(body: Any, start: int, size: int) -> BaseHTTPResponse:
    """A file as the HTTP answer that `mailboat.transfer` resumes and verifies."""
    if start and start >= size:
        return HTTPResponse(body=io.BytesIO(), status=416, preload_content=False)
    headers = {"Content-Length": str(size - start)}
    if start:
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    return HTTPResponse(body=body, status=206 if start else 200, headers=headers, preload_content=False)


def _missing(name: str) -> NotFound:
    return NotFound(404, "not_found", f"The blob store has no {name}.")


class BucketApi(Api):
    """The REST client with a stand-in: what the control plane can't answer because it is away, the blob store does.

    ``run_id`` is known once the island has enrolled. ``away``: the last look at the control plane failed.
    """

    def __init__(self, *arguments: Any, blob_url: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.run_id = ""
        self.away = False
        self._bucket = bucket_at(blob_url, self)

    def head(
        self, run: str, channel: str, *, after: int | None = None, wait: float = 0, etag: str | None = None
    ) -> Head | None:
        """The channel's head; in the store nobody announces a newer one, so it is looked at every few seconds."""
        try:
            found = super().head(run, channel, after=after, wait=0 if self.away else wait, etag=etag)
        except (Unreachable, ApiError) as error:
            if not _is_away(error):
                raise
            self.away = True
        else:
            self.away = False
            return found
        data = self._document(self._name(f"channels/{channel}.json"))
        tag = hashlib.sha256(data).hexdigest()
        if tag == etag:
            self.sleep(min(wait, POLL_SECONDS))
            return None
        return Envelope.from_json(data), tag

    def plan(self, run: str, *, from_digest: str | None, to: int, references: bool = False, **means: int | str) -> Plan:
        """The route; from the store by walking manifests back to what is held, or to an anchor."""
        ask = super().plan
        return self._or_alone(
            lambda: ask(run, from_digest=from_digest, to=to, references=references, **means),
            lambda: self._walk(from_digest, to),
        )

    def manifest(self, run: str, number: int) -> Envelope:
        """The envelope of a version's manifest."""
        ask = super().manifest
        return self._or_alone(lambda: ask(run, number), lambda: self._envelope(number))

    def version(self, run: str, number: int, *, patience: float | None = None) -> VersionInfo:
        """One version, as far as its manifest tells."""
        ask = super().version
        return self._or_alone(lambda: ask(run, number, patience=patience), lambda: self._version(number))

    def key_document(self, run: str, purpose: str, public_key: str) -> Envelope | None:
        """The document that vouches for a key."""
        ask = super().key_document
        name = self._name(f"keys/{public_key}.json") if purpose == PUBLISHER else f"head-keys/{public_key}.json"
        return self._or_alone(lambda: ask(run, purpose, public_key), lambda: Envelope.from_json(self._document(name)))

    def open_blob(self, run: str, sha256: str, *, start: int = 0, direct: bool = False) -> BaseHTTPResponse:
        """A blob from byte ``start`` on."""
        ask = super().open_blob
        return self._or_alone(
            lambda: ask(run, sha256, start=start, direct=direct),
            lambda: self._bucket.open(self._name(f"blobs/{sha256}"), start),
        )

    # -- alone

    def _or_alone(self, ask: Callable[[], T], alone: Callable[[], T]) -> T:
        if not self.away:
            try:
                return ask()
            except (Unreachable, ApiError) as error:
                if not _is_away(error):
                    raise
                # a 500 says that this one thing is broken there, as a damaged blob is; all else may well be had
                self.away = isinstance(error, Unreachable) or error.status in TRANSIENT
        return alone()

    def _name(self, rest: str) -> str:
        return f"runs/{self.run_id}/{rest}"

    def _document(self, name: str) -> bytes:
        response = self._bucket.open(name, 0)
        try:
            data = response.read(MAX_DOCUMENT + 1, decode_content=False)
        except OSError as error:
            raise Unreachable(f"Reading {name} broke off; try again.") from error
        finally:
            response.close()
        if len(data) > MAX_DOCUMENT:
            raise ManifestError(f"The document {name} is longer than any; it is refused.")
        return data

    def _envelope(self, number: int) -> Envelope:
        return Envelope.from_json(self._document(self._name(f"versions/{number}.json")))

    def _parsed(self, number: int) -> tuple[str, Manifest]:
        envelope = self._envelope(number)
        manifest = Manifest.from_bytes(envelope.open(MANIFEST_TYPE))
        if (manifest.run, manifest.number) != (self.run_id, number):
            raise ManifestError(f"The store's manifest of version {number} is that of another one; it is refused.")
        return envelope.payload_sha256, manifest

    def _version(self, number: int) -> VersionInfo:
        sha256, it = self._parsed(number)
        changed = None if it.patch is None else it.patch.changed
        size = None if it.patch is None else sum(part.size for part in it.patch.parts)
        return VersionInfo(
            number, it.epoch, "ready", "", it.state, sha256, changed, it.elements, it.full_bytes, size, None
        )

    def _walk(self, held: str | None, to: int) -> Plan:
        """Step patches from the state ``held`` where it lies on the way, else from the nearest anchor."""
        steps: list[PatchStep] = []  # the last one first
        at, (sha256, manifest) = to, self._parsed(to)
        for _ in range(LONGEST_WALK):
            if held is not None and manifest.state == held:
                return _planned(at, to, steps)
            if held is None and (files := self._anchor(at)) is not None:
                return _planned(None, to, steps, AnchorStep(at, sha256, files))
            if manifest.patch is None or manifest.parent is None:
                break
            steps.append(PatchStep(manifest.parent.number, at, sha256, manifest.patch.parts))
            at, wanted = manifest.parent.number, manifest.parent.state
            try:
                sha256, manifest = self._parsed(at)
            except NotFound:
                break  # retention has been here
            if manifest.state != wanted:
                raise ManifestError(f"The store's version {at} is not the parent of the one after it; it is refused.")
        if held is None:
            raise Conflict(409, "no_route", f"The blob store has no anchor below version {to}.")
        raise Conflict(409, "unknown_base", f"What is held does not lie below version {to}.")

    def _anchor(self, number: int) -> Files | None:
        try:
            found = json.loads(self._document(self._name(f"anchors/{number}.json")))
        except NotFound:
            return None
        except (ValueError, RecursionError):
            raise ManifestError(f"The store's list of the anchor {number} can't be read.") from None
        if not isinstance(found, list):
            raise ManifestError(f"The store's list of the anchor {number} is no list.")
        return tuple(AnchorFile.parse(item) for item in found)


def _planned(origin: int | None, to: int, steps: list[PatchStep], anchor: AnchorStep | None = None) -> Plan:
    size = sum(part.size for step in steps for part in step.parts)
    size += sum(file.blob.size for file in anchor.files) if anchor else 0
    first = () if anchor is None else (anchor,)
    return Plan(origin, to, size, (*first, *reversed(steps)))


def _is_away(error: Unreachable | ApiError) -> bool:
    return isinstance(error, Unreachable) or error.status >= 500
