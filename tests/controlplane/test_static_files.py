"""Style and script over the real server: without them no page is more than text."""

from __future__ import annotations

import urllib3


def test_static_files_come_whole_and_are_not_sent_twice(server: str) -> None:
    first = urllib3.request("GET", f"{server}/static/mailboat.css")
    assert first.status == 200
    assert first.headers["Content-Type"].startswith("text/css")
    assert b"@layer" in first.data
    again = urllib3.request(
        "GET", f"{server}/static/mailboat.css", headers={"If-Modified-Since": first.headers["Last-Modified"]}
    )
    assert (again.status, again.data) == (304, b"")


def test_an_unknown_static_file_is_not_found(server: str) -> None:
    assert urllib3.request("GET", f"{server}/static/../settings.py").status == 404
    assert urllib3.request("GET", f"{server}/static/absent.css").status == 404
