"""One world for the pages' tests: a project, its owner, a team mate who only reads, and a stranger from next door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from controlplane.registry.models import Project, Run, Version
from tests import factories as make
from tests.dashboard.browsing import chromium, reader  # noqa: F401  fixtures

LIVE_PAGES = ["fleet", "runs", "run", "version", "island", "jobs", "job", "skew", "workers", "audit", "tokens"]
PAGES = [*LIVE_PAGES, "people", "find", "tensors", "compare"]
HTMX = {"HX-Request": "true", "HX-Target": "live"}


@dataclass(frozen=True)
class World:
    """What every page has something to show of."""

    project: Project
    owner: User
    mate: User
    stranger: User
    run: Run
    versions: list[Version]
    island: Island
    job: Job

    def url(self, path: str = "") -> str:
        """An address inside the project."""
        return f"/projects/{self.project.slug}/{path}"

    @property
    def pages(self) -> dict[str, str]:
        """Every page that a member may read."""
        return {
            "fleet": self.url(),
            "runs": self.url("runs/"),
            "run": self.url("runs/demo/"),
            "version": self.url("runs/demo/versions/2/"),
            "island": self.url(f"islands/{self.island.pk}/"),
            "jobs": self.url("jobs/"),
            "job": self.url(f"jobs/{self.job.pk}/"),
            "skew": self.url("skew/"),
            "workers": self.url("jobs/workers/"),
            "audit": self.url("audit/"),
            "tokens": self.url("tokens/"),
            "people": self.url("people/"),
            "find": self.url("find/?q=nothing-like-it"),
            "tensors": self.url("runs/demo/versions/2/tensors/"),
            "compare": self.url("runs/demo/versions/2/compare/?from=99"),
        }

    @property
    def forms(self) -> dict[str, str]:
        """Pages with a form that only an operator may open."""
        return {
            "register": self.url("islands/register/"),
            "channel": self.url("runs/demo/channels/latest/?version=1"),
            "new channel": self.url("runs/demo/channels/new/"),
            "settings": self.url("runs/demo/settings/"),
        }


@pytest.fixture
def world(db: None, settings: Any) -> World:
    """A run of four versions, one island at the head, one job under way."""
    settings.PASSWORD_HASHERS = [
        "django.contrib.auth.hashers.MD5PasswordHasher"
    ]  # quick; people are made for each test
    settings.MAILBOAT_JOB_SENDER = "tests.factories.send_nowhere"
    project = make.mk_project("harbour", name="Harbour")
    run = make.mk_run(project, "demo")
    versions = make.create_line(run, 4)
    island = make.mk_island(run, "fsn1-a", at=versions[-1])
    make.mk_sync(island, versions[-1])
    make.mk_challenge(island, versions[-1])
    make.mk_audit(project, "run.edit", "run demo", before={"keep_days": None}, after={"keep_days": 9})
    make.mk_token(project, "trainer")
    make.mk_enrolment(run, "soon")
    make.mk_worker("check-1")
    job = make.mk_job(
        project, "replay", run=run, state="running", params={"version": 2}, done=1, total=2, unit="versions"
    )
    make.mk_event(job, "Version 1 rebuilt.")
    return World(
        project=project,
        owner=make.mk_member(project, "operator", "owner"),
        mate=make.mk_member(project, "viewer", "mate"),
        stranger=make.mk_member(make.mk_project("elsewhere"), "admin", "stranger"),
        run=run,
        versions=versions,
        island=island,
        job=job,
    )


@pytest.fixture
def owner(world: World) -> Client:
    """The owner's browser."""
    return signed_in(world.owner)


@pytest.fixture
def chief(world: World) -> Client:
    """The admin's browser."""
    return signed_in(make.mk_member(world.project, "admin", "chief"))


@pytest.fixture
def mate(world: World) -> Client:
    """The team mate's browser."""
    return signed_in(world.mate)


@pytest.fixture
def stranger(world: World) -> Client:
    """The stranger's browser."""
    return signed_in(world.stranger)


def signed_in(user: User) -> Client:
    """A browser of a signed-in person."""
    client = Client()
    client.force_login(user)
    return client


def live(client: Client, url: str, seen: str = "") -> Any:
    """Ask for the live part of a page, as the page does by itself."""
    separator = "&" if "?" in url else "?"
    return client.get(url + (f"{separator}seen={seen}" if seen else ""), headers=HTMX)
