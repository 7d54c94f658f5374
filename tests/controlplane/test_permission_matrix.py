"""Who may call what: every address that the resolver knows, with every method that it answers, as every kind of caller.

`permission_matrix.txt` holds what is expected. A new address without a row fails here with the row to judge and add.
Uploads (`blobs/uploads/{id}`) are answered below Django and have tests of their own in `api/test_streams.py`.

Statuses are those of a request without a body: 400 and 422 mean that the caller came in and said nothing useful.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.accounts import services as accounts
from controlplane.accounts.models import SignIn
from controlplane.dashboard.views.actions import ACTIONS
from controlplane.fleet import services as fleet
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import keys, leases
from controlplane.registry import services as registry
from controlplane.registry.models import Blob, Project, Run
from mailboat.identity import new_key, public_half, sign_enrolment
from tests.controlplane.conftest import enrol
from tests.controlplane.making import series

FILE = Path(__file__).with_name("permission_matrix.txt")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
CALLERS = (
    "anonymous", "viewer", "operator", "admin", "publisher", "optoken", "scoped", "island", "foreign", "pending",
    "stranger",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    method: str
    address: str
    statuses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.method:<7}{self.address:<72}" + "".join(f"{status:<10}" for status in self.statuses).rstrip()


def rows() -> dict[tuple[str, str], Row]:
    found: dict[tuple[str, str], Row] = {}
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            method, address, *statuses = line.split()
            assert (method, address) not in found, f"twice: {line}"
            assert len(statuses) == len(CALLERS), f"not one status for each caller: {line}"
            found[method, address] = Row(method, address, tuple(statuses))
    return found


def addresses(patterns: Any = None, before: str = "/") -> Iterator[str]:
    """Every address of the resolver, its variable parts as `{name}`."""
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        here = before + re.sub(r"<(?:[a-z]+:)?([a-z0-9_]+)>", r"{\1}", str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from addresses(pattern.url_patterns, here)
        else:
            assert isinstance(pattern, URLPattern)
            yield here


class World:
    """A project with one of everything, and one client for each kind of caller."""

    def __init__(self, project: Project, foreign: Project, run: Run, other_run: Run) -> None:
        versions = series(run, 2)
        self.island, credential = enrol(run, "lisbon")
        fleet.report_sync(
            self.island, from_version=None, version=1, digest=versions[1].state_digest, outcome="applied", verified=True
        )
        _, foreign_credential = enrol(other_run, "oslo")
        _, pending_credential = self_enrol(run)
        job, _ = jobs.enqueue("replay", run, {"version": 1}, "matrix")
        Job.objects.filter(pk=job.pk).update(state="failed", error="it failed")
        challenge = fleet.open_challenge(job, self.island, versions[1], b"0" * 32, [(0, 0, 4)])
        channel = run.channels.get(name="latest")
        enrolment, _ = fleet.create_enrolment_token(run, channel, "newcomer", actor="test")
        key, _ = keys.register(run, "ab" * 32, actor="test")
        lease = leases.take(versions[0], "somebody", timedelta(hours=1))
        upload = registry.begin_upload(run, "ab" * 32, 10)
        assert upload is not None
        people = {role: self._member(role, project) for role in ("viewer", "operator", "admin")}
        people["stranger"] = self._member("stranger", foreign)
        token, publisher = accounts.create_token(project, "publisher", "trainer", actor="test")
        _, operator = accounts.create_token(project, "operator", "script", actor="test")
        _, scoped = accounts.create_token(project, "publisher", "elsewhere", run=other_run, actor="test")
        self.clients = {
            "anonymous": Client(),
            **{name: client for name, (_, client) in people.items()},
            "publisher": bearer(publisher),
            "optoken": bearer(operator),
            "scoped": bearer(scoped),
            "island": bearer(credential),
            "foreign": bearer(foreign_credential),
            "pending": bearer(pending_credential),
        }
        for client in self.clients.values():
            client.raise_request_exception = False
        viewer = people["viewer"][0]
        self.values: dict[str, Any] = {
            "project": project.slug,
            "run": run.name,
            "number": 1,
            "sha256": Blob.objects.filter(run=run)[0].sha256,
            "upload": upload.pk,
            "channel": "latest",
            "island": self.island.pk,
            "challenge": challenge.pk,
            "key": key.pk,
            "lease": lease.pk,
            "job": job.pk,
            "enrolment": enrolment.pk,
            "tokens/{token}": token.pk,
            "enrolment-tokens/{token}": enrolment.pk,
            "user": viewer.pk,
            "person": viewer.pk,
            "session": SignIn.objects.get(user=viewer).pk,
            "form": "csv",
            "action": "drain",
            "rest": "nothing",
        }

    def _member(self, name: str, project: Project) -> tuple[Any, Client]:
        user = get_user_model().objects.create_user(f"{name}-person")
        accounts.set_membership(user, project, name if name != "stranger" else "admin", actor="test")
        client = Client()
        client.force_login(user)
        return user, client

    def url(self, address: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1]
            before = address[: match.start()].rstrip("/").rpartition("/")[2]
            for key in (f"{before}/{{{name}}}", name):
                if key in self.values:
                    return str(self.values[key])
            raise AssertionError(f"{address}: say in World.values what {{{name}}} is")

        return re.sub(r"\{([a-z0-9_]+)\}", value, address)

    def ask(self, caller: str, method: str, address: str) -> str:
        """The status of one request, whose changes are taken back."""
        options = {} if method == "GET" else {"data": b"{}", "content_type": "application/json"}
        if not address.startswith("/api/") and method != "GET":
            options = {"data": "", "content_type": "application/x-www-form-urlencoded"}
        client = self.clients[caller]
        cookies = copy.deepcopy(client.cookies)  # logging out must not last
        with transaction.atomic():
            response = client.generic(method, self.url(address), **options)  # type: ignore[arg-type]
            transaction.set_rollback(True)
        client.cookies = cookies
        return str(response.status_code)

    def row(self, method: str, address: str) -> Row:
        return Row(method, address, tuple(self.ask(caller, method, address) for caller in CALLERS))


def bearer(token: str) -> Client:
    return Client(headers={"Authorization": f"Bearer {token}"})


def self_enrol(run: Run) -> Any:
    channel, key = run.channels.get(name="latest"), new_key()
    _, plaintext = fleet.create_enrolment_token(run, channel, "rack", reusable=True, actor="test")
    proof = sign_enrolment(key, run.project.slug, plaintext)
    return fleet.enrol(run.project.slug, plaintext, hostname="rack-1", public_key=public_half(key), signature=proof)


@pytest.fixture
def world(project: Project, foreign: Project, run: Run, other_run: Run) -> World:
    return World(project, foreign, run, other_run)


def test_every_address_answers_every_caller_as_the_matrix_says(world: World) -> None:
    expected, missing, wrong = rows(), [], []
    for address in sorted(set(addresses())):
        for method in METHODS:
            if (method, address) not in expected:
                if world.ask("admin", method, address) != "405":
                    missing.append(world.row(method, address))
                continue
            row = expected.pop((method, address))
            found = world.row(method, address)
            if found != row:
                wrong.append(f"expected {row}\n   found {found}")
    assert not missing, f"judge these rows and add them to {FILE.name}:\n" + "\n".join(map(str, missing))
    assert not wrong, "the matrix does not agree:\n" + "\n".join(wrong)
    assert not expected, "no such address any more:\n" + "\n".join(map(str, expected.values()))


def test_a52_the_stranger_and_the_foreign_island_see_nothing() -> None:
    """A member of another project, and an island of another run: what is not theirs is 404, never 403."""
    for row in rows().values():
        status = dict(zip(CALLERS, row.statuses, strict=True))
        if "{project}" in row.address and row.address != "/api/v1/projects/{project}/islands/enrol":
            assert status["stranger"] == "404", str(row)
            assert status["anonymous"] in {"401", "302"}, str(row)
        if "{run}" in row.address and row.address.startswith("/api/"):
            assert status["foreign"] in {"404", "403"}, str(row)
            assert status["foreign"] == "404" or status["island"] == "403", str(row)
            assert status["scoped"] in ({"404"} if row.method == "GET" else {"404", "403", "400"}), str(row)


def test_viewers_and_islands_that_wait_change_nothing() -> None:
    enrol = "/api/v1/projects/{project}/islands/enrol"  # whoever has an enrolment token may
    for row in rows().values():
        status = dict(zip(CALLERS, row.statuses, strict=True))
        if row.method != "GET" and "{project}" in row.address and row.address != enrol:
            assert status["viewer"] in {"403", "404", "405"}, str(row)
        if "{project}" in row.address and row.address.startswith("/api/") and status["pending"] == "200":
            assert row.address == "/api/v1/projects/{project}/islands/{island}", str(row)


RUN, ISLAND, TOKEN = "runs/{run}", "islands/{island}", "tokens/{token}"
# What a page's form does, and the call of the API that does the same.
SAME = {
    "islands/register/": {"POST enrolment-tokens"},
    "islands/bulk/": {f"POST {ISLAND}/{order}" for order in ("verify", "drain", "disable", "enable")},
    f"{ISLAND}/verify/": {f"POST {ISLAND}/verify"},
    f"{ISLAND}/{{action}}/": {f"DELETE {ISLAND}"}
    | {f"POST {ISLAND}/{action.replace('_', '-')}" for action in ACTIONS if action != "remove"},
    "jobs/{job}/cancel/": {"POST jobs/{job}/cancel"},
    "jobs/{job}/rerun/": {"POST jobs/{job}/rerun"},
    "people/set/": {"POST members", "PATCH members/{user}"},
    "people/{person}/remove/": {"DELETE members/{user}"},
    f"{RUN}/channels/new/": {f"PUT {RUN}/channels/{{channel}}"},
    f"{RUN}/channels/{{channel}}/": {f"PUT {RUN}/channels/{{channel}}"},
    f"{RUN}/channels/{{channel}}/protect/": {f"PUT {RUN}/channels/{{channel}}"},
    f"{RUN}/settings/": {f"PATCH {RUN}"},
    f"{RUN}/keys/register/": {f"POST {RUN}/keys"},
    f"{RUN}/keys/{{key}}/revoke/": {f"DELETE {RUN}/keys/{{key}}"},
    f"{RUN}/collect/": {"POST jobs"},
    f"{RUN}/versions/{{number}}/replay/": {"POST jobs"},
    "tokens/new/": {"POST tokens"},
    f"{TOKEN}/rotate/": {f"POST {TOKEN}/rotate"},
    f"{TOKEN}/revoke/": {f"POST {TOKEN}/revoke"},
    "tokens/enrolment/{enrolment}/revoke/": {"POST enrolment-tokens/{token}/revoke"},
}


def test_a_form_and_the_call_that_does_the_same_are_open_to_the_same_people() -> None:
    """Both sides of one action ask for one role. A form without a row here fails: name its call."""
    found = rows()
    forms = {
        address.removeprefix("/projects/{project}/")
        for method, address in found
        if method == "POST" and address.startswith("/projects/{project}/")
    }
    assert forms == SAME.keys()
    for form, calls in SAME.items():
        page = dict(zip(CALLERS, found["POST", f"/projects/{{project}}/{form}"].statuses, strict=True))
        for call in calls:
            method, address = call.split()
            other = dict(zip(CALLERS, found[method, f"/api/v1/projects/{{project}}/{address}"].statuses, strict=True))
            for who in ("viewer", "operator", "admin", "stranger"):
                closed = {"403", "404"}
                assert (page[who] if page[who] in closed else "open") == (
                    other[who] if other[who] in closed else "open"
                ), f"{who}: {form} answers {page[who]}, {call} answers {other[who]}"
