"""Three people (owner, team mate, stranger), the project that two of them share, tokens, a run and an island."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from controlplane.accounts import services as accounts
from controlplane.fleet import services as fleet
from controlplane.fleet.models import Island
from controlplane.registry import services as registry
from controlplane.registry.models import Channel, Project, Run

SENT: list[tuple[str, str]] = []


def record_send(job: str, kind: str) -> None:
    """Stands where the broker is."""
    SENT.append((job, kind))


@pytest.fixture(autouse=True)
def surroundings(home: Path, settings: Any) -> Any:
    """A blob store of its own, and wake-ups that are written down."""
    SENT.clear()
    settings.MAILBOAT_JOB_SENDER = "tests.controlplane.conftest.record_send"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return home


@pytest.fixture
def sent() -> list[tuple[str, str]]:
    """The wake-ups so far: (job, kind)."""
    return SENT


@pytest.fixture
def project(db: None) -> Project:
    """The project of owner and team mate."""
    return registry.create_project("harbour", "Harbour", actor="test")


@pytest.fixture
def foreign(db: None) -> Project:
    """The stranger's project."""
    return registry.create_project("elsewhere", "Elsewhere", actor="test")


@pytest.fixture
def run(project: Project) -> Run:
    """A run of the shared project."""
    return registry.create_run(project, "minilm", actor="test")


@pytest.fixture
def other_run(project: Project) -> Run:
    """Another run of the same project."""
    return registry.create_run(project, "qwen", actor="test")


@pytest.fixture
def person(project: Project, foreign: Project) -> Callable[[str], Client]:
    """A logged-in client of owner (admin), mate (viewer) or stranger (admin elsewhere)."""
    places = {"owner": (project, "admin"), "mate": (project, "viewer"), "stranger": (foreign, "admin")}

    def login(name: str) -> Client:
        user, _ = get_user_model().objects.get_or_create(username=name)
        where, role = places[name]
        accounts.set_membership(user, where, role, actor="test")
        client = Client()
        client.force_login(user)
        return client

    return login


class Api:
    """Calls of one token, with JSON in and out."""

    def __init__(self, project: str, token: str | None) -> None:
        self.base = f"/api/v1/projects/{project}/"
        self.token = token
        self.client = Client()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **options: Any) -> Any:
        """GET."""
        headers = self.headers | options.pop("headers", {})
        return self.client.get(self.base + path, headers=headers, **options)

    def post(self, path: str, body: Any = None) -> Any:
        """POST."""
        return self.client.post(
            self.base + path, {} if body is None else body, content_type="application/json", headers=self.headers
        )


@pytest.fixture
def token(project: Project) -> Callable[..., Api]:
    """Calls with a fresh token of a role (None: without a token)."""

    def make(role: str | None, where: Project | None = None) -> Api:
        if role is None:
            return Api(project.slug, None)
        _, plaintext = accounts.create_token(where or project, role, role, actor="test")
        return Api(project.slug, plaintext)

    return make


def enrol(run: Run, name: str = "porto") -> tuple[Island, str]:
    """An island of the run and its credential."""
    channel = Channel.objects.get(run=run, name="latest")
    _, plaintext = fleet.create_enrolment_token(run, channel, name, provider="cloudia", region="eu", actor="test")
    return fleet.enrol(run.project.slug, plaintext, agent_version="0.1.0", cores=2, codecs=["positional"])


@pytest.fixture
def island(run: Run) -> Island:
    """An enrolled island."""
    return enrol(run)[0]


@pytest.fixture
def island_api(run: Run) -> tuple[Island, Api]:
    """An enrolled island and its calls."""
    row, credential = enrol(run, "lisbon")
    return row, Api(run.project.slug, credential)
