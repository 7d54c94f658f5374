"""Options of the sidecar that can't be meant are refused before anything listens."""

from __future__ import annotations

import pytest

from mailboat.island.sidecar.assembly import EngineOptions, EngineOptionsError


def check(*urls: str) -> None:
    EngineOptions("vllm", urls, "127.0.0.1:0").check()


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        (("127.0.0.1:8000",), "no http address"),
        (("localhost:8000",), "no http address"),
        (("",), "no http address"),
        (("ftp://127.0.0.1:8000",), "no http address"),
        (("http://",), "no http address"),
        (("http://127.0.0.1:port",), "no address"),
        (("http://127.0.0.1:99999",), "no address"),
        (("http://127.0.0.1:8000/v1",), "more than an engine's address"),
        (("http://127.0.0.1:8000?x=1",), "more than an engine's address"),
        (("http://me:secret@127.0.0.1:8000",), "^--engine-url has a user"),
        (("http://127.0.0.1:8000", "http://127.0.0.1:8000/"), "given twice"),
        (("http://engine", "http://ENGINE:80"), "given twice"),
    ],
)
def test_an_engines_address_is_scheme_host_and_port(urls: tuple[str, ...], why: str) -> None:
    with pytest.raises(EngineOptionsError, match=why):
        check(*urls)


def test_addresses_that_are_fine() -> None:
    check("http://127.0.0.1:8000", "http://127.0.0.1:8001/", "https://engine.example.com", "http://[::1]:8000")
