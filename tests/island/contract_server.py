"""A small server of the REST contract over real sockets, with faults on order: what a network and a store can do to a
client.

It keeps everything in memory, accepts every version at once (unless told to fail it), and never checks what it is
given: the checks under test are the client's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from mailboat.identity import public_half
from mailboat.manifest import HEAD_TYPE, MANIFEST_TYPE, Envelope, Head, Manifest
from mailboat.signing import sign
from tests.waiting import PATIENCE

PROJECT, RUN, CHANNEL = "harbour", "voyage", "latest"
PREFIX = f"/api/v1/projects/{PROJECT}/"
RUN_PREFIX = f"runs/{RUN}/"


@dataclass
class Fault:
    """What to do to the next ``times`` answers whose "METHOD path" matches ``where``.

    ``kind``: ``cut`` (the connection ends after ``at`` body bytes), ``flip`` (the byte ``at`` is another), ``short``
    (the object ends after ``at`` bytes and says so), ``stale`` (another object with its own ETag), ``status`` (answers
    ``at``), ``drop`` (does the work, then closes without an answer), ``refuse`` (closes without doing anything).
    """

    where: str
    kind: str
    at: int = 0
    times: int = 1


@dataclass
class Reply:
    """An answer before faults."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    blob: bool = False


class Problem(Exception):
    """An answer that is a problem document."""

    def __init__(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.code, self.headers = status, code, headers or {}


@dataclass
class Version:
    """A version as the server keeps it."""

    manifest: Manifest
    envelope: Envelope
    anchor: list[dict[str, Any]] | None
    state: str = "ready"
    reason: str = ""


class ContractServer:
    """The state of the server; tests read and write it directly."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.run_id = str(uuid.uuid4())
        self.epoch = 1
        self.run_says: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, int, bytearray]] = {}
        self.versions: dict[int, Version] = {}
        self.head: Head | None = None
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self.beats: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        self.tokens = {"once"}
        self.credential = "secret"  # what the next island gets
        self.refused: set[str] = set()  # credentials that are not known any more
        self.enabled = True
        self.head_keys: list[str] = []  # private; with none, nothing is said about keys
        self.publishers: dict[str, Envelope | None] = {}
        self.head_documents: dict[str, Envelope] = {}
        self.revoked: list[str] = []
        self.derived = False
        self.released = False  # lets long polls end at once
        self.runs: set[str] = {RUN}
        self.elsewhere: dict[int, str] = {}  # version -> where its anchor lies beside, or instead of, the blobs
        self.mirror: dict[str, bytes] = {}  # files of another server, at GET mirror/NAME, which takes no credential
        self.verdict: Callable[[Manifest], tuple[str, str]] = lambda _manifest: ("ready", "")
        self.on_call: Callable[[str], None] = lambda _call: None
        self.changed = threading.Condition()
        self.waiting = 0  # long polls that are not answered yet
        self._http = ThreadingHTTPServer((host, 0), _handler(self))
        self._http.daemon_threads = True
        self.address = f"http://{host}:{self._http.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[ContractServer]:
        """Serves for the length of a block."""
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    # -- what tests do to it

    def put(self, data: bytes) -> str:
        """Stores a blob."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def point(self, number: int, **changes: Any) -> Head:
        """Moves the channel; ``changes`` replace fields of the new head."""
        manifest = self.versions[number].manifest
        now = int(time.time())
        serial = self.head.serial + 1 if self.head else 1
        head = Head(
            run=manifest.run, channel=CHANNEL, version=number, epoch=manifest.epoch, manifest=manifest.sha256,
            state=manifest.state, generation=1, serial=serial, issued=now, expires=now + 3600,
        )  # fmt: skip
        with self.changed:
            self.head = replace(head, **changes)
            self.changed.notify_all()
        return self.head

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Waits until something that the server was told makes ``condition`` true, which may raise LookupError before
        that; returns its answer.
        """

        def answer() -> Any:
            with contextlib.suppress(LookupError):
                return condition()

        with self.changed:
            found = self.changed.wait_for(answer, PATIENCE)
            assert found, f"not within {PATIENCE} s; last calls {self.calls[-8:]}"
            return found

    def applied(self, number: int) -> dict[str, Any] | None:
        """The newest report of a success at a version."""
        found = [r for r in self.reports if r["outcome"] == "applied" and r["version"] == number]
        return found[-1] if found else None

    # -- the calls

    def answer(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> Reply:
        """One call."""
        call = f"{method} {path}"
        self.on_call(call)
        if headers.get("Authorization", "").removeprefix("Bearer ") in self.refused:
            raise Problem(401, "unauthorised")
        for pattern, handle in self._routes().items():
            if match := re.fullmatch(pattern, call):
                return handle(*match.groups(), query=query, headers=headers, body=body)
        raise Problem(404, "not_found")

    def _routes(self) -> dict[str, Callable[..., Reply]]:
        run = re.escape(RUN_PREFIX)
        return {
            "POST runs": self._create_run,
            f"GET runs/{RUN}": self._run,
            f"POST {run}blobs": self._begin,
            f"PATCH {run}blobs/uploads/(.+)": self._piece,
            f"HEAD {run}blobs/uploads/(.+)": self._offset,
            f"GET {run}blobs/([0-9a-f]+)": self._blob,
            f"POST {run}versions": self._commit,
            f"GET {run}versions": self._versions,
            f"GET {run}versions/(\\d+)": self._version,
            f"GET {run}versions/(\\d+)/manifest": self._manifest,
            f"GET {run}trust": self._trust,
            f"GET {run}channels/{CHANNEL}/head": self._head,
            f"GET {run}plan": self._plan,
            "GET mirror/(.+)": self._mirrored,
            "POST islands/enrol": self._enrol,
            "GET islands/([^/]+)": self._island,
            "POST islands/(.+)/heartbeat": self._beat,
            "POST islands/(.+)/syncs": self._report,
            "POST islands/(.+)/challenges/(.+)": self._challenge,
        }

    def _create_run(self, *, body: bytes, **_: Any) -> Reply:
        name = json.loads(body)["name"]
        if name in self.runs:
            raise Problem(409, "run_exists")
        self.runs.add(name)
        return _json({"name": name}, 201)

    def _run(self, **_: Any) -> Reply:
        ready = max((n for n, v in self.versions.items() if v.state == "ready"), default=None)
        latest = None
        if ready is not None:
            latest = {"number": ready, "state_digest": self.versions[ready].manifest.state}
        standing = {"epoch": {"number": self.epoch}, "latest_ready": latest}
        return _json({"id": self.run_id, "name": RUN} | standing | self.run_says)

    def _begin(self, *, body: bytes, **_: Any) -> Reply:
        wanted = json.loads(body)
        if wanted["sha256"] in self.blobs:
            return _json({"exists": True})
        upload = wanted["sha256"][:16]
        if wanted["size"] == 0:
            self.blobs[wanted["sha256"]] = b""
            return _json({"exists": True})
        kept = self.uploads.setdefault(upload, (wanted["sha256"], wanted["size"], bytearray()))
        return _json({"exists": False, "upload": upload, "offset": len(kept[2])}, 201)

    def _piece(self, upload: str, *, headers: Any, body: bytes, **_: Any) -> Reply:
        if upload not in self.uploads:
            raise Problem(404, "not_found")
        sha256, size, data = self.uploads[upload]
        if int(headers["Upload-Offset"]) != len(data):
            raise Problem(409, "upload_offset", {"Upload-Offset": str(len(data))})
        data += body
        if len(data) >= size:
            del self.uploads[upload]
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Problem(422, "digest_mismatch")
            self.blobs[sha256] = bytes(data)
        return Reply(204, headers={"Upload-Offset": str(len(data))})

    def _offset(self, upload: str, **_: Any) -> Reply:
        if upload not in self.uploads:
            raise Problem(404, "not_found")
        return Reply(204, headers={"Upload-Offset": str(len(self.uploads[upload][2]))})

    def _blob(self, sha256: str, *, headers: Any, **_: Any) -> Reply:
        if sha256 not in self.blobs:
            raise Problem(404, "not_found")
        data = self.blobs[sha256]
        etag = f'"{sha256}"'
        common = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "immutable"}
        wanted = re.fullmatch(r"bytes=(\d+)-", headers.get("Range", ""))
        if wanted and headers.get("If-Range", etag) == etag:
            start = int(wanted[1])
            if start >= len(data):
                return Reply(416, headers={**common, "Content-Range": f"bytes */{len(data)}"}, blob=True)
            span = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return Reply(206, data[start:], {**common, "Content-Range": span}, blob=True)
        return Reply(200, data, common, blob=True)

    def _commit(self, *, body: bytes, **_: Any) -> Reply:
        request = json.loads(body)
        envelope = Envelope.from_dict(request["envelope"])
        manifest = Manifest.from_bytes(envelope.open(MANIFEST_TYPE))
        known = self.versions.get(manifest.number)
        if known is not None:
            if known.envelope.payload != envelope.payload:
                raise Problem(409, "version_conflict")
            return _json(self.described(manifest.number), 200)
        missing = (
            [part.sha256 for part in manifest.patch.parts if part.sha256 not in self.blobs] if manifest.patch else []
        )
        if missing or manifest.inventory.sha256 not in self.blobs or manifest.digests.sha256 not in self.blobs:
            raise Problem(422, "missing_parts")
        state, reason = self.verdict(manifest)
        self.add(manifest, request["anchor"], state, reason, envelope)
        return _json(self.described(manifest.number), 202)

    def add(
        self,
        manifest: Manifest,
        anchor: list[dict[str, Any]] | None,
        state: str = "ready",
        reason: str = "",
        envelope: Envelope | None = None,
    ) -> None:
        """Takes a version in and moves the channel when it is ready."""
        self.put(manifest.to_bytes())
        envelope = envelope or Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes())
        self.versions[manifest.number] = Version(manifest, envelope, anchor, state, reason)
        if state == "ready":
            self.point(manifest.number)

    def described(self, number: int) -> dict[str, Any]:
        """A version as the API shows it."""
        version = self.versions[number]
        manifest = version.manifest
        patch = manifest.patch
        return {
            "number": number,
            "epoch": manifest.epoch,
            "state": version.state,
            "reason": version.reason,
            "state_digest": manifest.state,
            "manifest": {"sha256": manifest.sha256},
            "changed": patch and patch.changed,
            "elements": manifest.elements,
            "full_bytes": manifest.full_bytes,
            "patch_bytes": patch and sum(part.size for part in patch.parts),
            "job": None,
        }

    def _versions(self, **_: Any) -> Reply:
        newest = [self.described(max(self.versions))] if self.versions else []
        return _json({"results": newest, "next": None})

    def _version(self, number: str, **_: Any) -> Reply:
        if int(number) not in self.versions:
            raise Problem(404, "not_found")
        return _json(self.described(int(number)))

    def _head(self, *, query: dict[str, str], headers: Any, **_: Any) -> Reply:
        after = int(query["after"]) if "after" in query else None
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.released or (self.head is not None and (after is None or self.head.serial != after)),
                float(query.get("wait", 0)),
            )
            self.waiting -= 1
            head = self.head
        if head is None:
            return Reply(204)
        etag = f'"{hashlib.sha256(head.to_bytes()).hexdigest()}"'
        if headers.get("If-None-Match") == etag:
            return Reply(304, headers={"ETag": etag})
        return Reply(200, self.signed_head(head).to_json(), {"ETag": etag})

    def signed_head(self, head: Head) -> Envelope:
        """The head as it is sent; tests put another function in its place."""
        envelope = Envelope.wrap(HEAD_TYPE, head.to_bytes())
        for private in self.head_keys:
            envelope = sign(envelope, private)
        return envelope

    def _manifest(self, number: str, **_: Any) -> Reply:
        return Reply(200, self.versions[int(number)].envelope.to_json())

    def _trust(self, **_: Any) -> Reply:
        def listed(keys: dict[str, Envelope | None]) -> list[dict[str, Any]]:
            return [{"public_key": key, "endorsement": said and said.to_dict()} for key, said in keys.items()]

        heads = {public_half(private): self.head_documents.get(public_half(private)) for private in self.head_keys}
        return _json({"publishers": listed(self.publishers), "revoked": self.revoked, "heads": listed(heads)})

    def _keys(self) -> dict[str, Any]:
        if not self.head_keys:
            return {}
        heads = [public_half(private) for private in self.head_keys]
        pinned = [] if self.derived else list(self.publishers)
        said = {"publishers": pinned, "revoked": self.revoked, "heads": heads, "derived": self.derived}
        return {"keys": said}

    def _plan(self, *, query: dict[str, str], **_: Any) -> Reply:
        to = int(query["to"])
        held = query.get("from_digest")
        origin = None
        if held:
            known = [n for n, v in self.versions.items() if v.manifest.state == held and n <= to]
            if not known:
                raise Problem(409, "unknown_base")
            origin = max(known)
        plan = self.plan(origin, to)
        if "references" in query:
            for step in plan["steps"]:
                if step["kind"] == "anchor" and step["version"] in self.elsewhere:
                    step["uri"] = self.elsewhere[step["version"]]
        return _json(plan)

    def _mirrored(self, name: str, *, headers: Any, **_: Any) -> Reply:
        assert "Authorization" not in headers, "the credential left the control plane"
        if name not in self.mirror:
            raise Problem(404, "not_found")
        data, tag = self.mirror[name], {"ETag": '"of-its-own"'}
        wanted = re.fullmatch(r"bytes=(\d+)-", headers.get("Range", ""))
        if not wanted:
            return Reply(200, data, tag)
        start = int(wanted[1])
        return Reply(206, data[start:], tag | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})

    def plan(self, origin: int | None, to: int) -> dict[str, Any]:
        """Step patches from ``origin``, else the newest anchor and step patches."""
        steps: list[dict[str, Any]] = []
        at = to
        while at != origin:
            version = self.versions[at]
            manifest = version.manifest
            if manifest.patch is None or manifest.parent is None or (origin is None and version.anchor):
                steps.insert(
                    0, {"kind": "anchor", "version": at, "manifest": manifest.sha256, "files": version.anchor or []}
                )
                origin = None
                break
            parts = [{"sha256": part.sha256, "size": part.size} for part in manifest.patch.parts]
            steps.insert(
                0,
                {
                    "kind": "patch",
                    "from": manifest.parent.number,
                    "to": at,
                    "manifest": manifest.sha256,
                    "parts": parts,
                },
            )
            at = manifest.parent.number
        total = sum(f["size"] for step in steps for f in step.get("files", step.get("parts")))
        return {"from": origin, "to": to, "bytes": total, "steps": steps}

    def _enrol(self, *, body: bytes, **_: Any) -> Reply:
        token = json.loads(body)["token"]
        if token not in self.tokens:
            raise Problem(403, "enrolment_used")
        self.tokens.discard(token)
        island = {"id": str(uuid.uuid4()), "name": "skerry"}
        return _json(
            {"island": island, "credential": self.credential, "run": RUN, "run_id": self.run_id, "channel": CHANNEL,
             "heartbeat_seconds": 0.2, **self._keys()}, 201,
        )  # fmt: skip

    def _island(self, island: str, **_: Any) -> Reply:
        return _json({"id": island, "pending": False})

    def _beat(self, _island: str, *, body: bytes, **_: Any) -> Reply:
        with self.changed:
            self.beats.append(said := json.loads(body))
            self.changed.notify_all()
            known = self.versions.get(said["version"])
            unreported = (
                known is not None and known.manifest.state == said["digest"] and not self.applied(said["version"])
            )
        return _json(
            {"commands": self.commands, "heartbeat_seconds": 0.2, "enabled": self.enabled, "unreported": unreported,
             **self._keys()}
        )  # fmt: skip

    def _report(self, _island: str, *, body: bytes, **_: Any) -> Reply:
        with self.changed:
            self.reports.append(json.loads(body))
            self.changed.notify_all()
        return _json({}, 201)

    def _challenge(self, _island: str, challenge: str, *, body: bytes, **_: Any) -> Reply:
        with self.changed:
            self.answers.append(json.loads(body))
            self.commands = [c for c in self.commands if c.get("challenge") != challenge]
            self.changed.notify_all()
        return _json({})


def _json(body: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _handler(server: ContractServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            address = urlsplit(self.path)
            path = unquote(address.path).removeprefix(PREFIX)
            call = f"{self.command} {path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = self._fault(call)
            with server.changed:
                server.calls.append(call)
            if fault and fault.kind == "refuse":
                self.close_connection = True
                return
            query = {key: values[0] for key, values in parse_qs(address.query).items()}
            try:
                if fault and fault.kind == "status":
                    raise Problem(fault.at, "on_order")
                reply = server.answer(self.command, path, query, self.headers, body)
            except Problem as problem:
                document = {"type": "about:blank", "title": problem.code, "status": problem.status,
                            "code": problem.code, "detail": f"The server says {problem.code}."}  # fmt: skip
                headers = {"Content-Type": "application/problem+json", **problem.headers}
                reply = Reply(problem.status, json.dumps(document).encode(), headers)
            if fault and fault.kind == "drop":
                self.close_connection = True
                return
            self._send(reply, fault)

        def _fault(self, call: str) -> Fault | None:
            for fault in server.faults:
                if fault.times > 0 and re.fullmatch(fault.where, call):
                    fault.times -= 1
                    return fault
            return None

        def _send(self, reply: Reply, fault: Fault | None) -> None:
            body, headers, cut = reply.body, dict(reply.headers), None
            if fault and fault.kind == "cut":
                cut = fault.at
            elif fault and fault.kind == "flip":
                changed = bytearray(body)
                changed[fault.at % len(changed)] ^= 0x55
                body = bytes(changed)
            elif fault and fault.kind == "short":
                body = body[: fault.at]
                if "Content-Range" in headers:
                    start = int(headers["Content-Range"].split()[1].split("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{start + len(body)}"
            elif fault and fault.kind == "stale":
                body = b"an older object"
                headers = {"ETag": '"' + hashlib.sha256(body).hexdigest() + '"'}
                reply.status = 200
            self.send_response(reply.status)
            if reply.status not in {204, 304}:
                headers["Content-Length"] = str(len(body))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if reply.status in {204, 304} or self.command == "HEAD":
                return
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

        do_GET = do_POST = do_PATCH = do_HEAD = _serve

        def log_message(self, *_: Any) -> None:
            """Stays quiet."""

    return Handler
