"""An operator's journey in a real browser against the real server: sign in, register an island, see it arrive, watch.

Each page is checked with axe in both themes, for errors in the console (the content security policy reports there) and
for sideways scrolling at 320 pixels.
"""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any
from urllib.request import Request, urlopen

import pytest
from django.utils import timezone

from controlplane.fleet.models import Island
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry import keys
from mailboat.identity import new_key, public_half
from tests import factories as make
from tests.dashboard.browsing import axe
from tests.dashboard.conftest import World
from tests.waiting import PATIENCE


def _call(server: str, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = Request(f"{server}/api/v1/projects/harbour/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_register_an_island_and_see_it_arrive(reader: Any, server: str, world: World) -> None:
    person = reader()
    page = person.page
    page.click("text=Register island")
    page.fill("[name=name]", "hel1-b")
    page.fill("[name=provider]", "hetzner")
    page.fill("[name=region]", "hel1")
    page.click("text=Create the command")
    page.wait_for_selector("text=Waiting for hel1-b")
    assert re.search(r"/islands/register/\d+/$", page.url), "the address can be loaded again"
    command = page.inner_text("#command")
    assert f"--server {server}" in command
    copied = page.get_attribute(".command [data-copy]", "data-copy")
    assert copied.split() == command.replace("\\\n", "").split(), "what is copied is what is shown"
    assert axe(page) == []

    token = command.split("--token ")[1].split()[0]
    enrolled = _call(
        server,
        "islands/enrol",
        {
            "token": token,
            "engine": "checkpoint",
            "agent_version": "0.1.0",
            "cores": 2,
            "codecs": ["dense"],
            "hostname": "node-9",
        },
    )
    page.wait_for_selector("text=waiting for the first heartbeat")
    beat = {
        "version": None,
        "digest": None,
        "epoch": None,
        "phase": "fetching",
        "reason": "",
        "time": timezone.now().timestamp(),
    }
    _call(server, f"islands/{enrolled['island']['id']}/heartbeat", beat, enrolled["credential"])
    page.wait_for_selector("text=hel1-b has arrived")
    assert page.locator("[data-live]").count() == 0, "polling has ended"

    page.click("text=Open hel1-b")
    page.wait_for_selector("h1:has-text('hel1-b')")
    page.click("nav >> text=Fleet")
    page.wait_for_selector("tr:has-text('hel1-b')")
    assert person.complaints == []


def test_fleet_follows_and_keeps_focus(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.wait_for_selector("tr:has-text('fsn1-a')")
    page.focus("tr >> text=fsn1-a")
    version = make.mk_version(world.run, 4, parent=world.versions[-1])
    make.announce(version)
    page.wait_for_selector("a[aria-label='Version 4']")
    page.wait_for_selector("tr:has-text('fsn1-a'):has-text('1 version')")
    assert page.evaluate("document.activeElement.textContent") == "fsn1-a"

    Island.objects.update(last_seen_at=timezone.now() - timedelta(hours=3))
    page.wait_for_selector("text=Its heartbeats have stopped.")
    assert page.title() == "(1) Fleet · Mailboat"
    assert page.get_attribute("#favicon", "href").endswith("lost=1")
    assert person.complaints == []


def test_job_follows_to_its_end(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.goto(world.pages["job"])
    JobEvent.objects.create(job=world.job, level="info", message="Version 2 rebuilt.")
    page.wait_for_selector("text=Version 2 rebuilt.")
    page.wait_for_selector("#live-note:not([hidden])")
    Job.objects.filter(pk=world.job.pk).update(
        state="succeeded", finished_at=timezone.now(), result={"identical": True}
    )
    page.wait_for_selector("text=Succeeded")
    assert page.locator("[data-live]").count() == 0
    page.wait_for_selector("#live-note", state="hidden")
    assert person.complaints == []


def test_open_details_survive_a_swap(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.goto(world.pages["run"])
    page.click("text=The numbers behind the chart")
    make.mk_version(world.run, 4, parent=world.versions[-1])
    page.wait_for_selector("#version-4")
    assert page.locator("#chart-data").get_attribute("open") is not None


def test_silence_of_the_server_is_said(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.wait_for_selector("[data-live]")
    page.route("**/projects/**", lambda route: route.abort())
    page.wait_for_selector("#stale:not([hidden])")
    assert "has not answered since" in page.inner_text("#stale")
    page.unroute("**/projects/**")
    page.wait_for_selector("#stale", state="hidden")


def test_copy_button_copies_the_whole_digest(reader: Any, world: World) -> None:
    person = reader()
    person.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=person.server)
    page = person.page
    page.goto(world.pages["run"])
    page.click("#version-3 [data-copy]")
    page.wait_for_selector("#announce:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == world.versions[3].state_digest


def test_everything_works_without_javascript(reader: Any, world: World) -> None:
    person = reader(java_script_enabled=False)
    page = person.page
    page.click("text=Lost")
    assert "health=lost" in page.url
    page.goto(world.pages["island"])
    page.click("text=Verify now")
    page.wait_for_selector("h1:has-text('Verification of fsn1-a')")
    page.goto(world.pages["run"])
    page.click("#version-3 button:has-text('Replay')")
    page.wait_for_selector("h1:has-text('Replay of demo v3')")
    page.goto(world.url("islands/register/"))
    page.fill("[name=name]", "plain")
    page.click("text=Create the command")
    page.click("text=Look whether it has arrived")
    page.wait_for_selector("text=Waiting for plain")
    page.click("text=Log out")
    page.wait_for_url("**/login/")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_clean_for_axe(reader: Any, world: World, scheme: str) -> None:
    make.mk_island(world.run, "gone", at=world.versions[0], last_seen_at=timezone.now() - timedelta(hours=2))
    make.mk_version(world.run, 4, parent=world.versions[-1], state="failed", reason="A digest differs.")
    waiting = make.mk_island(world.run, "waiting", pending=True, public_key=public_half(new_key()))
    make.mk_member(world.project, "admin", "chief")
    person = reader("chief", color_scheme=scheme)
    page = person.page
    extra = {
        "no match": world.url("?health=disabled"),
        "filtered": world.url("?sync=behind&sort=-skew"),
        "waiting": world.url(f"islands/{waiting.pk}/"),
        "new token": world.url("tokens/new/"),
    }
    for name, address in {**world.pages, **world.forms, **extra}.items():
        page.goto(address)
        page.evaluate("document.querySelectorAll('main details').forEach((step) => (step.open = true))")
        assert axe(page) == [], name
    page.context.clear_cookies()
    page.goto("/login/")
    assert axe(page) == []
    assert person.complaints == []


def test_pages_fit_320_pixels(reader: Any, world: World) -> None:
    make.mk_member(world.project, "admin", "chief")
    # What is long and has no place to break: fingerprints, an actor's name, a reason with a long word.
    keys.register(world.run, public_half(new_key()), "trainer", actor="enrolment:0f8465f68209f382")
    Island.objects.update(phase="error", reason=f"The file {'a' * 120} is damaged.")
    person = reader("chief", viewport={"width": 320, "height": 700})
    page = person.page
    for name, address in {**world.pages, **world.forms, "new token": world.url("tokens/new/")}.items():
        page.goto(address)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{name} is {over} pixels too wide"


def test_keyboard_reaches_the_content_first(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
