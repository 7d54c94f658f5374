"""What operators do, from beginning to end, in a real browser with a real trainer, a real worker and a real island
process: register and catch up, drain, replay, and an island that lies. The first is done with the keyboard alone.

Set MAILBOAT_SCREENSHOTS to a folder to keep a picture of each step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from django.utils import timezone

from controlplane.accounts import services as accounts
from controlplane.fleet.models import Island
from controlplane.registry.models import Channel, Version
from mailboat.trainer import Publisher
from tests import factories as make
from tests.dashboard.browsing import axe
from tests.dashboard.conftest import World
from tests.waiting import PATIENCE, eventually

MOST_TABS = 120
RUN = "voyage"


@pytest.fixture
def trainer(world: World, server: str, settings: Any, home: Path, tmp_path: Path) -> Iterator[Publisher]:
    """A trainer that has published an anchor and a patch, with a worker for each job."""
    settings.MAILBOAT_JOB_SENDER = "tests.together.test_real_server.work_at_once"
    token = accounts.create_token(world.project, "publisher", "journey", actor="test")[1]
    weights = np.random.default_rng(7).standard_normal((400, 64)).astype(np.float32)
    with Publisher(server, "harbour", RUN, token, state_dir=tmp_path / "trainer") as publisher:
        publisher.publish({"a.weight": weights}, step=0, side_files={"config.json": b"{}"}).wait_ready(PATIENCE)
        weights[::9, 5] += 1
        publisher.publish({"a.weight": weights}, step=8).wait_ready(PATIENCE)
        yield publisher
    from tests.together.test_real_server import RUNNING

    for thread in RUNNING:
        thread.join(PATIENCE)
    RUNNING.clear()


def picture(page: Any, name: str) -> None:
    folder = os.environ.get("MAILBOAT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def tab_to(page: Any, words: str) -> None:
    """Go on by Tab until the focus is on what says these words; it has to be seen there."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement; const l = e.labels && e.labels[0];
            return [(l ? l.innerText : "") + " " + (e.innerText || "") + " " + (e.getAttribute("aria-label") || ""),
                    getComputedStyle(e).outlineStyle]; }"""
        )
        if words.lower() in found[0].lower():
            assert found[1] != "none", f"the focus on {words!r} is not to be seen"
            return
    pytest.fail(f"Tab never came to {words!r}")


def _call(server: str, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = Request(f"{server}/api/v1/projects/harbour/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_by_keyboard_register_catch_up_drain_and_replay(
    reader: Any, world: World, server: str, trainer: Publisher, settings: Any, tmp_path: Path
) -> None:
    settings.MAILBOAT_HEARTBEAT_SECONDS = 1
    person = reader()
    page = person.page
    tab_to(page, "Register island")
    page.keyboard.press("Enter")
    page.wait_for_selector("[name=name]:focus")
    page.keyboard.type("skerry")
    page.keyboard.press("Tab")
    page.keyboard.type(f"{RUN} ")  # the list opens the choice that begins so
    tab_to(page, "Provider")
    page.keyboard.type("hetzner")
    tab_to(page, "Create the command")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Waiting for skerry")
    picture(page, "1-waiting")

    words = page.get_attribute(".command [data-copy]", "data-copy").split()
    assert words[:3] == ["mailboat", "island", "run"]
    store = tmp_path / "skerry"
    command = [sys.executable, "-m", "mailboat.cli", *words[1:], "--image", str(tmp_path / "image")]
    command[command.index("--store") + 1] = str(store)
    with (tmp_path / "island.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "NO_PROXY": "*"})
    try:
        page.wait_for_selector("text=skerry has arrived")
        picture(page, "2-arrived")
        tab_to(page, "Open skerry")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('skerry')")
        page.wait_for_selector("text=At the head.")
        assert page.locator("#live >> text=Current").count()
        picture(page, "3-caught-up")

        tab_to(page, "Drain")
        page.keyboard.press("Enter")
        tab_to(page, "Deadline")
        page.keyboard.press("Control+A")
        page.keyboard.type("1")
        tab_to(page, "Drain skerry")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=skerry is asked to drain")
        page.wait_for_selector("#drain-title")
        picture(page, "4-draining")
        tab_to(page, "Take requests again")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=skerry takes requests again")

        tab_to(page, "Jump to")
        page.keyboard.type(f"{RUN} v1")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('Version 1')")
        tab_to(page, "Replay this version")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"h1:has-text('Replay of {RUN} v1')")
        page.wait_for_selector("text=Succeeded")
        assert page.locator("[data-live]").count() == 0
        picture(page, "5-replayed")
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert person.complaints == []


def test_tensors_and_comparison_of_a_real_version(reader: Any, world: World, trainer: Publisher) -> None:
    page = reader().page
    page.goto(world.url(f"runs/{RUN}/versions/1/"))
    page.click("text=Tensors")
    page.wait_for_selector("h1:has-text('Tensors of v1')")
    assert "1 of 1 tensor changed" in page.inner_text("main")
    assert axe(page) == []
    page.goto(world.url(f"runs/{RUN}/versions/1/compare/"))
    assert "a.weight" in page.inner_text("main")
    assert axe(page) == []


def test_an_island_that_lies_is_found_and_shown(
    reader: Any, world: World, server: str, trainer: Publisher, settings: Any
) -> None:
    """A47 as an operator sees it."""
    version = Version.objects.get(run__name=RUN, number=1)
    run, channel = version.run, Channel.objects.get(run__name=RUN, name="latest")
    token = accounts.create_token(world.project, "island", "liar", actor="test")
    island = make.mk_island(run, "liar", at=version, channel=channel, token=token[0])
    person = reader()
    page = person.page
    page.goto(world.url(f"islands/{island.pk}/"))
    page.click("text=Verify now")
    page.wait_for_selector("h1:has-text('Verification of liar')")
    beat = {
        "version": 1,
        "digest": version.state_digest,
        "epoch": 0,
        "phase": "idle",
        "reason": "",
        "time": timezone.now().timestamp(),
    }
    commands = eventually(lambda: _call(server, f"islands/{island.pk}/heartbeat", beat, token[1])["commands"])
    answer = {"version": 1, "digest": version.state_digest, "answer": "0" * 64}
    _call(server, f"islands/{island.pk}/challenges/{commands[0]['challenge']}", answer, token[1])
    page.wait_for_selector("text=Failed")
    picture(page, "6-failed-verification")
    page.goto(world.url(f"islands/{island.pk}/"))
    page.wait_for_selector("text=Disabled")
    picture(page, "7-disabled-island")
    page.goto(world.url())
    page.wait_for_selector("text=Verification failed:")
    picture(page, "8-needs-attention")
    assert not Island.objects.get(pk=island.pk).enabled
    assert person.complaints == []


def test_a_hundred_ticks_are_two_steps(reader: Any, world: World) -> None:
    for number in range(3):
        make.mk_island(world.run, f"hel-{number}", at=world.versions[-1])
    person = reader()
    page = person.page
    for number in range(2):
        page.check(f"[value=hel-{number}]")
    make.mk_island(world.run, "hel-9", at=world.versions[-1])
    page.wait_for_selector("tr:has-text('hel-9')")  # the table changed under the reader's hands
    assert page.is_checked("[value=hel-0]"), "a tick survives"
    page.click("button:has-text('Disable')")
    page.wait_for_selector("h1:has-text('Disable 2 islands?')")
    picture(page, "9-bulk")
    page.click("button:has-text('Disable 2 islands')")
    page.wait_for_selector("text=2 islands disabled.")
    assert person.complaints == []


def test_a_form_half_filled_survives_the_news(reader: Any, world: World) -> None:
    person = reader()
    page = person.page
    page.goto(world.pages["island"])
    page.click("summary:has-text('Disable')")
    page.fill("#disable-reason", "Half a reas")
    page.focus("#disable-reason")
    make.mk_sync(world.island, world.versions[2], outcome="failed", accepted=False, error="Part 0 broke off.")
    page.wait_for_selector("text=Part 0 broke off.")
    assert page.input_value("#disable-reason") == "Half a reas"
    assert page.evaluate("document.activeElement.id") == "disable-reason"
    assert person.complaints == []
