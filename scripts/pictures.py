"""The pictures of the guide, taken from the demo's own state: its database, its versions, its islands.

Starts the control plane on the home of `scripts/demo`, signs in with the demo's login and looks at each page with
Chromium. The islands of the demo do not run meanwhile, so the server is told to be patient with their heartbeats.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200 * 1024
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
RUN = "minilm"
LISTS = 1000  # pixels of a long page that are kept
PAGES = {
    "fleet": "",
    "skew": "skew/",
    "run": f"runs/{RUN}/",
    "version": f"runs/{RUN}/versions/{{number}}/",
    "tensors": f"runs/{RUN}/versions/{{number}}/tensors/",
    "compare": f"runs/{RUN}/versions/{{number}}/compare/?from=0",
    "roll-back": f"runs/{RUN}/channels/latest/?version=1",
    "settings": f"runs/{RUN}/settings/",
    "register": "islands/register/",
    "island": "{island}",
    "jobs": "jobs/",
    "workers": "jobs/workers/",
    "audit": "audit/",
    "tokens": "tokens/",
    "people": "people/",
}
DARK, NARROW = ("fleet",), ("fleet", "island")


def main() -> int:
    """Take them all, or those that are named."""
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PAGES)} (default: all)")
    parser.add_argument("--port", type=int, default=8600, help="the server's port (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where they go (default: docs/images)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(PAGES))
    home = Path(os.environ.get("MAILBOAT_HOME") or ROOT / "var") / "demo"
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if unknown:
        return _say(f"there is no picture {unknown[0]}; see --help")
    if not (home / "login.json").exists():
        return _say("run `scripts/demo --versions 9` first; the pictures show what it leaves behind")
    if program is None:
        return _say("there is no chromium here; install Debian's package chromium")
    os.environ["MAILBOAT_HOME"] = str(home)
    os.environ["MAILBOAT_HEARTBEAT_SECONDS"] = "3600"
    from controlplane.embedded.stack import Stack, StackError

    try:
        with Stack(home, port=arguments.port) as stack:
            stack.wait_ready()
            _take(stack.url, json.loads((home / "login.json").read_text()), program, arguments)
    except StackError as error:
        return _say(str(error))
    return 0


def _say(problem: str) -> int:
    print(f"screenshots: {problem}", file=sys.stderr)
    return 1


def _take(url: str, login: dict[str, str], program: str, arguments: Any) -> None:
    from playwright.sync_api import sync_playwright

    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = arguments.names or list(PAGES)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-quic"])
        looks: tuple[tuple[str, Sequence[str], Any, Any], ...] = (
            ("", list(PAGES), WIDE, "light"),
            ("-dark", DARK, WIDE, "dark"),
            ("-phone", NARROW, PHONE, "light"),
        )
        for suffix, names, size, scheme in looks:
            context = browser.new_context(base_url=url, viewport=size, color_scheme=scheme)
            page = context.new_page()
            places = _places(page, login)
            for name in names:
                if name in wanted:
                    page.goto("/projects/demo/" + PAGES[name].format(**places))
                    page.wait_for_load_state("networkidle")
                    _keep(page, arguments.out / f"{name}{suffix}.png", size["width"])
            context.close()
        browser.close()


def _places(page: Any, login: dict[str, str]) -> dict[str, str]:
    """Sign in; the address of the first island and the number of the head."""
    page.goto("/login/")
    page.fill("[name=username]", login["user"])
    page.fill("[name=password]", login["password"])
    page.keyboard.press("Enter")
    page.wait_for_url("**/projects/**")
    number = page.get_attribute(".figure a", "aria-label").removeprefix("Version ")
    return {"island": page.get_attribute("table.fleet a[href^='islands/']", "href"), "number": number}


def _keep(page: Any, path: Path, width: int) -> None:
    height = min(LISTS, page.evaluate("document.documentElement.scrollHeight"))
    page.set_viewport_size({"width": width, "height": height})
    raw = _repacked(page.screenshot())
    page.set_viewport_size({"width": width, "height": 800})
    path.write_bytes(raw)
    note = "" if len(raw) < MOST_BYTES else "  too large for the guide: over 200 KiB"
    print(f"{path.name:<20} {len(raw) / 1024:6.1f} KiB{note}")


def _repacked(png: bytes) -> bytes:
    """The same pixels, compressed as well as zlib can; chunks that only tell about the file are left out."""
    kept: list[tuple[bytes, bytes]] = []
    pixels, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"IDAT":
            pixels += data
        elif kind in (b"IHDR", b"PLTE", b"tRNS"):
            kept.append((kind, data))
    kept += [(b"IDAT", zlib.compress(zlib.decompress(pixels), 9)), (b"IEND", b"")]
    return png[:8] + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in kept
    )


if __name__ == "__main__":
    sys.exit(main())
