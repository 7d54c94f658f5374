"""The typed REST client of trainers and islands: one method per call, over urllib3.

Calls that may be repeated without harm are retried with growing, jittered pauses when the connection fails or the
server says 502, 503 or 504 (`mailboat.patience`). It must never repeat a call that is not idempotent, never follow a
redirect with the credential, and never put a credential into an error's text. Bulk bytes (resume, verification) are
the subject of `mailboat.transfer`.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, SSLError
from urllib3.response import BaseHTTPResponse

from mailboat import __version__
from mailboat.direct import Direct
from mailboat.errors import ApiError, Conflict, MailboatError, Misaddressed, NotFound, Unauthorised, Unreachable
from mailboat.manifest import Envelope
from mailboat.patience import ATTEMPTS, Sleep, Tries
from mailboat.replies import (
    AnchorFile,
    Enrolment,
    HeartbeatReply,
    IslandInfo,
    Plan,
    RunInfo,
    TrustInfo,
    Upload,
    VersionInfo,
    bad_reply,
)
from mailboat.signing import HEAD

MAX_DOCUMENT = 256 << 20  # bytes of one JSON answer or small blob held in memory
PLAIN = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})  # OpenSSL's

Head = tuple[Envelope, str]  # the envelope and its ETag


class Api:
    """The calls of one project.

    ``server`` is the control plane's address (``https://host[:port][/prefix]``), ``token`` a bearer token, ``ca_file``
    a PEM file of certificate authorities. ``HTTP_PROXY``, ``HTTPS_PROXY``, ``NO_PROXY`` and ``SSL_CERT_FILE`` are
    honoured. ``patience``: seconds for which outages are borne, beyond ``attempts`` tries. ``sleep`` waits between
    them (an island passes one that wakes when it is told to stop). Safe to use from several threads.
    """

    def __init__(
        self,
        server: str,
        project: str,
        token: str | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        attempts: int = ATTEMPTS,
        patience: float = 0.0,
        sleep: Sleep = time.sleep,
    ) -> None:
        address = urlsplit(server)
        if address.scheme not in {"http", "https"} or not address.hostname:
            raise Misaddressed(f"{server!r} is not a server address; write it as https://host[:port].")
        self.server = server.rstrip("/")
        self.project = project
        self.token = token
        self.attempts = attempts
        self.patience = patience
        self.sleep = sleep
        self._timeout = timeout
        self._ca_file = ca_file
        self._base = f"{self.server}/api/v1/projects/{quote(project, safe='')}"
        self._pool = _pool(address.scheme, address.hostname, ca_file)
        self.direct = Direct(address.scheme, ca_file, timeout)

    def close(self) -> None:
        """Closes idle connections."""
        self._pool.clear()
        self.direct.close()

    # -- runs and versions

    def create_run(self, name: str, *, served_format: str = "") -> bool:
        """Creates a run; one of that name that exists is fine. Whether it was made now."""
        body = {"name": name} | ({"served_format": served_format} if served_format else {})
        try:
            self._json("POST", "runs", body)
        except Conflict:
            return False
        return True

    def run(self, run: str) -> RunInfo:
        """A run with its current epoch and newest ready version."""
        return RunInfo.parse(self._json("GET", _path("runs", run)))

    def open_epoch(self, run: str, from_version: int | None, reason: str, *, from_state: str = "") -> int:
        """Starts a new epoch from a version, or from the state with a digest (which no version need have), and returns
        its number. Not retried: each success opens one more.
        """
        told: dict[str, Any] = {"from_version": from_version, "reason": reason}
        told |= {"from_state": from_state} if from_state else {}
        body = self._json("POST", _path("runs", run, "epochs"), told, retry=False)
        if not isinstance(body, Mapping) or not isinstance(body.get("number"), int):
            raise bad_reply("an epoch's number")
        return int(body["number"])

    def commit_version(self, run: str, envelope: Envelope, anchor: Iterable[AnchorFile] | None = None) -> VersionInfo:
        """Commits a version by its manifest. The same manifest is the same version, so a lost answer is retried."""
        files = None if anchor is None else [file.as_json() for file in anchor]
        body = {"envelope": json.loads(envelope.to_json()), "anchor": files}
        return VersionInfo.parse(self._json("POST", _path("runs", run, "versions"), body))

    def commit_checkpoint(
        self, run: str, checkpoint: str, *, number: int, parent: int | None, epoch: int, step: int | None = None
    ) -> VersionInfo:
        """Asks the server's workers to build a version from a checkpoint under one of their allowed roots."""
        body: dict[str, Any] = {"checkpoint": checkpoint, "number": number, "parent": parent, "epoch": epoch}
        if step is not None:
            body["step"] = step
        return VersionInfo.parse(self._json("POST", _path("runs", run, "versions"), body))

    def manifest(self, run: str, number: int) -> Envelope:
        """The envelope of a version's manifest, with its signatures."""
        return Envelope.from_json(self.request("GET", _path("runs", run, "versions", str(number), "manifest")).data)

    def trust(self, run: str) -> TrustInfo:
        """The keys of publishers and heads with what vouches for them, and the revoked ones."""
        return TrustInfo.parse(self._json("GET", _path("runs", run, "trust")))

    def key_document(self, run: str, purpose: str, public_key: str) -> Envelope | None:
        """The document by which an older key vouches for this one: ``purpose`` is `publisher` or `head`."""
        told = self.trust(run)
        return (told.heads if purpose == HEAD else told.publishers).get(public_key)

    def version(self, run: str, number: int, *, patience: float | None = None) -> VersionInfo:
        """One version, with less than this client's ``patience`` where the caller has less."""
        path = _path("runs", run, "versions", str(number))
        return VersionInfo.parse(self._json("GET", path, patience=patience))

    def newest_version(self, run: str) -> VersionInfo | None:
        """The version with the highest number, in whatever state; None in an empty run."""
        return next(iter(self.newest_versions(run, limit=1)), None)

    def newest_versions(self, run: str, *, limit: int) -> list[VersionInfo]:
        """The last versions, in whatever state, newest first."""
        body = self._json("GET", _path("runs", run, "versions"), query={"limit": limit})
        results = body.get("results") if isinstance(body, Mapping) else None
        if not isinstance(results, list):
            raise bad_reply("a list of versions")
        return [VersionInfo.parse(item) for item in results]

    # -- blobs

    def begin_upload(self, run: str, sha256: str, size: int, *, direct: bool = False) -> Upload:
        """Announces a blob: it exists already, or an upload to continue at an offset. With ``direct`` the parts that go
        straight to the blob store, where it takes such.
        """
        body = {"sha256": sha256, "size": size} | ({"direct": True} if direct else {})
        return Upload.parse(self._json("POST", _path("runs", run, "blobs"), body))

    def complete_upload(self, run: str, upload: str) -> bool:
        """Has the parts joined and checked: True when it is done, False while it is still at work (ask again). Raises
        Conflict ``parts_missing``, ApiError ``digest_mismatch``.
        """
        path = _path("runs", run, "blobs", "uploads", upload, "complete")
        return self.request("POST", path, body=b"{}", headers={"Content-Type": "application/json"}).status != 202

    def send_piece(self, run: str, upload: str, offset: int, piece: bytes | memoryview) -> int:
        """Sends bytes at ``offset``; returns the server's offset afterwards. Never retried here: the caller asks for
        the offset.
        """
        headers = {"Upload-Offset": str(offset), "Content-Type": "application/octet-stream"}
        path = _path("runs", run, "blobs", "uploads", upload)
        response = self.request("PATCH", path, body=bytes(piece), headers=headers, retry=False, accept={409})
        return _offset_of(response, default=offset + len(piece) if response.status != 409 else None)

    def upload_offset(self, run: str, upload: str) -> int:
        """How many bytes of an upload the server holds."""
        return _offset_of(self.request("HEAD", _path("runs", run, "blobs", "uploads", upload)), default=None)

    def open_blob(self, run: str, sha256: str, *, start: int = 0, direct: bool = False) -> BaseHTTPResponse:
        """Opens a blob from byte ``start`` as a stream of raw bytes, with ``direct`` from the blob store where it has
        addresses of its own. One try: `mailboat.transfer` resumes and verifies.

        The status is 200 (from zero), 206 or 416. The caller reads with ``decode_content=False`` and releases the
        connection.
        """
        headers = {"Accept-Encoding": "identity", "Accept": "*/*"}
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": f'"{sha256}"'}
        path, query = _path("runs", run, "blobs", sha256), {"direct": 1} if direct else {}
        found = self.request("GET", path, query=query, headers=headers, retry=False, stream=True, accept={307, 416})
        if found.status != 307:
            return found
        found.drain_conn()
        found.release_conn()
        return self.direct.get(found.headers.get("Location", ""), start)

    def open_elsewhere(self, url: str, *, start: int = 0) -> BaseHTTPResponse:
        """Opens a public file outside of the control plane from byte ``start``, as `open_blob`; the credential stays
        here. Its ETag means nothing to us and is left out. Raises Unreachable, ApiError.
        """
        address = urlsplit(url)
        headers = {"Accept-Encoding": "identity", "Accept": "*/*", "User-Agent": f"mailboat/{__version__}"}
        headers |= {"Range": f"bytes={start}-"} if start else {}
        try:
            response = _pool(address.scheme, address.hostname or "", self._ca_file).request(
                "GET", url, headers=headers, timeout=self._timeout, retries=urllib3.Retry(0, redirect=5),
                preload_content=False,
            )  # fmt: skip
        except (HTTPError, OSError, ValueError) as error:
            raise Unreachable(
                f"{url} can't be reached ({_cause(error)}); check the address and the network."
            ) from error
        response.headers.discard("ETag")
        if response.status in {200, 206, 416}:
            return response
        response.close()
        raise ApiError(response.status, "elsewhere", f"{url} answered {response.status}.")

    # -- islands

    def head(
        self, run: str, channel: str, *, after: int | None = None, wait: float = 0, etag: str | None = None
    ) -> Head | None:
        """The channel's head, or None when there is none yet or ``etag`` still matches after ``wait`` seconds (at most
        60).

        One try: the caller's loop is the retry.
        """
        query: dict[str, Any] = {} if after is None else {"after": after}
        if wait:
            query["wait"] = math.ceil(wait)
        response = self.request(
            "GET",
            _path("runs", run, "channels", channel, "head"),
            query=query,
            headers={"If-None-Match": etag} if etag else {},
            retry=False,
            timeout=self._timeout + wait,
            accept={304},
        )
        if response.status in {204, 304}:
            return None
        return Envelope.from_json(response.data), response.headers.get("ETag", "")

    def plan(self, run: str, *, from_digest: str | None, to: int, references: bool = False, **means: int | str) -> Plan:
        """The route to version ``to``; with ``references`` it may begin at an anchor that lies elsewhere. ``means`` are
        what it is planned for: ``cores``, ``codecs``, ``link``. Raises Conflict ``unknown_base`` or ``no_route``.
        """
        query: dict[str, Any] = {"to": to} | ({"from_digest": from_digest} if from_digest else {}) | means
        query |= {"references": 1} if references else {}
        return Plan.parse(self._json("GET", _path("runs", run, "plan"), query=query))

    def show_plan(self, run: str, **query: int | str) -> Mapping[str, Any]:
        """The same with bytes and seconds of each step, to be read by people."""
        answer = self._json("GET", _path("runs", run, "plan"), query=query)
        if not isinstance(answer, Mapping):
            raise bad_reply("a plan")
        return answer

    def enrol(self, token: str, about: Mapping[str, Any]) -> Enrolment:
        """Trades a one-time token for a credential. One try: a lost answer has used the token up."""
        return Enrolment.parse(self._json("POST", "islands/enrol", {"token": token, **about}, retry=False))

    def island(self, island: str, *, timeout: float | None = None) -> IslandInfo:
        """What the control plane says of the island."""
        return IslandInfo.parse(self._json("GET", _path("islands", island), retry=False, timeout=timeout))

    def heartbeat(self, island: str, body: Mapping[str, Any]) -> HeartbeatReply:
        """Says what the island holds and does; the answer carries commands. One try: the next beat comes anyway."""
        return HeartbeatReply.parse(self._json("POST", _path("islands", island, "heartbeat"), body, retry=False))

    def report_sync(self, island: str, report: Mapping[str, Any]) -> None:
        """Reports the outcome of a sync. A repeated report is harmless."""
        self._json("POST", _path("islands", island, "syncs"), report)

    def answer_challenge(self, island: str, challenge: str, answer: Mapping[str, Any]) -> None:
        """Answers a verify challenge."""
        self._json("POST", _path("islands", island, "challenges", challenge), answer)

    def probe(self, path: str) -> BaseHTTPResponse:
        """One look at an address of the server outside projects, whatever its status. Raises Unreachable."""
        headers = {"Accept": "application/json", "User-Agent": f"mailboat/{__version__}"}
        every = range(200, 600)
        return self._once("GET", f"{self.server}/{path}", None, headers, self._timeout, stream=False, accept=every)

    # -- whoever asks

    def caller(self) -> Mapping[str, Any]:
        """What the server makes of this token: ``{role, actor, run, island, expires_at, server_version}``."""
        return self._object("GET", "caller")

    # -- operators

    def create_enrolment_token(self, run: str, name: str, **about: str | bool) -> Mapping[str, Any]:
        """Makes a one-time token for an island: ``{id, token, command, expires_at}``. Not retried."""
        return self._object("POST", "enrolment-tokens", {"run": run, "name": name, **about}, retry=False)

    def keys(self, run: str) -> list[Mapping[str, Any]]:
        """The publishers' keys of a run, newest first."""
        found = self._object("GET", _path("runs", run, "keys")).get("results")
        if not isinstance(found, list):
            raise bad_reply("a list of keys")
        return found

    def register_key(
        self, run: str, public_key: str, name: str = "", endorsement: Envelope | None = None
    ) -> Mapping[str, Any]:
        """Registers a publisher's key, or sends an endorsement for one. Again changes nothing."""
        body = {"public_key": public_key, "name": name, "endorsement": endorsement and endorsement.to_dict()}
        return self._object("POST", _path("runs", run, "keys"), body)

    def revoke_key(self, run: str, key: str, reason: str) -> Mapping[str, Any]:
        """Revokes a key by its id. Again changes nothing."""
        return self._object("DELETE", _path("runs", run, "keys", key), {"reason": reason})

    def fleet(self) -> Mapping[str, Any]:
        """Islands, their versions and health."""
        return self._object("GET", "fleet")

    def create_job(self, kind: str, **params: Any) -> Mapping[str, Any]:
        """Starts a replay or verify job; a duplicate joins the unfinished one."""
        return self._object("POST", "jobs", {"kind": kind, **params})

    def job(self, job: str) -> Mapping[str, Any]:
        """A job with its events."""
        return self._object("GET", _path("jobs", job))

    # -- transport

    def _object(self, method: str, path: str, body: Any = None, *, retry: bool = True) -> Mapping[str, Any]:
        answer = self._json(method, path, body, retry=retry)
        if not isinstance(answer, Mapping):
            raise bad_reply("an object")
        return answer

    def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        retry: bool = True,
        patience: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        response = self.request(
            method, path, body=data, query=query or {}, headers=headers, retry=retry, patience=patience, timeout=timeout
        )
        if not response.data:
            return {}
        try:
            return json.loads(response.data)
        except (ValueError, RecursionError):
            raise bad_reply("it is not JSON") from None

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        retry: bool = True,
        patience: float | None = None,
        stream: bool = False,
        timeout: float | None = None,
        accept: Iterable[int] = (),
    ) -> BaseHTTPResponse:
        """Makes one call; returns its answer when it is a success or one of ``accept``, else raises a typed error."""
        url = f"{self._base}/{path}" + (f"?{urlencode(query)}" if query else "")
        sent = {"Accept": "application/json", "User-Agent": f"mailboat/{__version__}", **(headers or {})}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        tries = self.tries(patience)
        while True:
            try:
                return self._once(method, url, body, sent, timeout or self._timeout, stream=stream, accept=accept)
            except (Unreachable, ApiError) as error:
                if not retry or not tries.another(error):
                    raise

    def tries(self, patience: float | None = None) -> Tries:
        """The tries of one piece of work, with less than this client's ``patience`` where the caller has less."""
        borne = self.patience if patience is None else max(0.0, min(patience, self.patience))
        return Tries(self.attempts, borne, self.sleep)

    def _once(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout: float,
        *,
        stream: bool,
        accept: Iterable[int],
    ) -> BaseHTTPResponse:
        limits = urllib3.Timeout(connect=min(10.0, timeout), read=timeout)
        try:
            response = self._pool.request(
                method, url, body=body, headers=dict(headers), timeout=limits, retries=False, redirect=False,
                preload_content=False,
            )  # fmt: skip
            if 200 <= response.status < 300 or response.status in set(accept):
                if not stream:
                    self._load(response)
                return response
            self._load(response)
        except SSLError as error:
            raise _tls_problem(self.server, error) from error
        except LocationParseError as error:
            raise Misaddressed(f"{self.server!r} is not a server address; write it as https://host[:port].") from error
        except (HTTPError, OSError) as error:
            raise Unreachable(
                f"{self.server} can't be reached ({_cause(error)}); check the address and the network."
            ) from error
        raise _problem(response)

    def _load(self, response: BaseHTTPResponse) -> None:
        """Reads a whole bounded answer into ``response.data`` and gives the connection back."""
        data = response.read(MAX_DOCUMENT + 1, decode_content=True)
        if len(data) > MAX_DOCUMENT:
            response.close()
            raise bad_reply("it is longer than any answer")
        response._body = data  # type: ignore[attr-defined]  # so that .data gives what was read here
        response.release_conn()


def _path(*parts: str) -> str:
    return "/".join(quote(part, safe="") for part in parts)


def _cause(error: BaseException) -> str:
    """The innermost reason, without addresses of objects."""
    reason = getattr(error, "reason", None)
    inner = reason if isinstance(reason, BaseException) else error
    inner = next((part for part in inner.args if isinstance(part, BaseException)), inner)
    text = str(inner).rsplit(": ", 1)[-1]
    return text or type(inner).__name__


def _tls_problem(server: str, error: SSLError) -> Unreachable:
    """What a failed TLS handshake means: a certificate, an address without TLS, or something that may pass."""
    inner = error.args[0] if error.args else error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return Misaddressed(f"The certificate of {server} is not trusted ({inner.verify_message}); give its CA file.")
    if getattr(inner, "reason", None) in PLAIN:
        return Misaddressed(f"{server} does not speak TLS; is it the right port, or is http:// meant?")
    return Unreachable(f"TLS with {server} failed ({inner}); check the address and what stands before the server.")


def _pool(scheme: str, host: str, ca_file: str | os.PathLike[str] | None) -> urllib3.PoolManager:
    options: dict[str, Any] = {"maxsize": 4, "block": False}
    if scheme == "https" or ca_file is not None:  # a file that can't be used is a mistake, needed or not
        try:
            options["ssl_context"] = ssl.create_default_context(cafile=None if ca_file is None else os.fspath(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise MailboatError(f"The CA file {os.fspath(ca_file or '')!r} can't be used ({error}).") from error
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        return urllib3.ProxyManager(proxy, **options)
    return urllib3.PoolManager(**options)


def _offset_of(response: BaseHTTPResponse, *, default: int | None) -> int:
    text = response.headers.get("Upload-Offset")
    if text is not None and text.isascii() and text.isdigit():
        return int(text)
    if default is None:
        raise bad_reply("the header Upload-Offset")
    return default


def _problem(response: BaseHTTPResponse) -> ApiError:
    """The typed error of a problem document, or of any other answer that is not a success."""
    code, detail = f"http_{response.status}", f"The server answered {response.status}."
    try:
        body = json.loads(response.data)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        code = body["code"] if isinstance(body.get("code"), str) else code
        detail = next((body[key] for key in ("detail", "title") if isinstance(body.get(key), str)), detail)
    kinds = {401: Unauthorised, 403: Unauthorised, 404: NotFound, 409: Conflict}
    asked = response.headers.get("Retry-After", "")
    seconds = float(asked) if asked.isascii() and asked.isdigit() else 0.0
    return kinds.get(response.status, ApiError)(response.status, code, detail, seconds)
