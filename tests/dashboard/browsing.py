"""A real browser for the journeys of `test_browser*.py`: the fixture `reader` makes people who sit at one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests import factories as make
from tests.waiting import PATIENCE

ARGUMENTS = [
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the module. Without one the journey is skipped, except in CI, where it must not be."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("No chromium here: install Debian's package chromium; CI must run the browser tests.")
        pytest.skip("No chromium here: install Debian's package chromium to run the browser tests.")
    from playwright.sync_api import sync_playwright

    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = (
        "true"  # playwright keeps an event loop in this thread; rows are read between its calls
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS, timeout=1000 * PATIENCE)
        yield browser
        browser.close()
    if before is None:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
    else:
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


class Reader:
    """A person at a browser: what the console says is kept, since a page that complains is broken."""

    def __init__(self, browser: Any, server: str, **context: Any) -> None:
        self.server = server
        self.context = browser.new_context(base_url=server, **context)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def sign_in(self, name: str) -> None:
        """Through the door."""
        self.page.goto("/login/")
        self.page.fill("[name=username]", name)
        self.page.fill("[name=password]", make.PASSWORD)
        self.page.click("text=Log in")
        self.page.wait_for_url("**/projects/**")


@pytest.fixture
def reader(chromium: Any, server: str, world: Any, settings: Any) -> Iterator[Any]:
    """Makes readers and closes them."""
    settings.MAILBOAT_PUBLIC_URL = server
    settings.MAILBOAT_HEARTBEAT_SECONDS = 60
    made: list[Reader] = []

    def make_reader(name: str = "owner", **context: Any) -> Reader:
        person = Reader(chromium, server, **context)
        made.append(person)
        person.sign_in(name)
        return person

    yield make_reader
    for person in made:
        person.context.close()


def axe(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{item['id']}: {item['help']} at {[node['target'] for node in item['nodes']][:3]}" for item in found]
