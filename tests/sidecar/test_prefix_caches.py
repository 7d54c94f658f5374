"""No answer is computed from an engine's prefix cache of older weights, on whichever route it was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import urllib3

from mailboat.island.engines.openapi import routes_declaring
from mailboat.island.sidecar.routes import KEYS, ROUTES, Cache, Kind
from mailboat.island.sidecar.types import CommitMode, Keyless, Unavailable
from mailboat.island.sidecar.upstreams import Upstream, Upstreams
from tests.engines.contract_engine import CARRYING, GENERATING, ContractEngine
from tests.sidecar.harness import Station, station
from tests.waiting import eventually

RESET = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}
BODY = {"prompt": "hello", "max_tokens": 2}
DECLARED = sorted(path for path in GENERATING if ROUTES[path].vllm is Cache.DECLARED and path in CARRYING["vllm"][1])
REFUSED = [
    ("vllm", "/generate"), ("vllm", "/v2/embed"), ("vllm", "/v1/audio/transcriptions"),
    *(("sglang", path) for path in ("/v1/messages", "/v1/embeddings", "/score", "/v1/audio/transcriptions")),
]  # fmt: skip


def straight(running: Station, path: str) -> Any:
    """The version that an engine's prefix cache computed the prompt under, for a client of its own."""
    return urllib3.request("POST", running.engine.url + path, json=BODY, timeout=30).json()["cached_under"]


@pytest.mark.parametrize("path", DECLARED)
def test_a36_routes_that_take_a_key_meet_no_older_weights(path: str, tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for version in range(2):
            assert straight(running, path) == 0, "what the key is for"
            assert running.post(path, BODY)[1]["cached_under"] == version
            for own in ("me", ""):
                assert running.post(path, BODY | {"cache_salt": own})[1]["cached_under"] == version
            running.step()


@pytest.mark.parametrize(("kind", "path"), REFUSED)
def test_a36_routes_without_a_key_are_refused_unless_the_cache_is_reset(kind: str, path: str, tmp_path: Path) -> None:
    with station([ContractEngine(kind)], tmp_path / "in_place") as running:
        status, body, _ = running.post(path, BODY)
        assert status == 403 and body["error"]["type"] == "RouteBlocked" and not body["error"]["retryable"]
        assert path in body["error"]["message"] and "--commit-mode drain" in body["error"]["message"]
        assert running.engine.seen == []
    with station([ContractEngine(kind)], tmp_path / "drain", mode=CommitMode.DRAIN) as running:
        for version in range(2):
            assert running.post(path, BODY)[1]["cached_under"] == version
            running.step()


def test_what_computes_nothing_from_weights_passes_as_it_is(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        assert running.post("/tokenize", BODY)[0] == 200
        assert running.engine.seen == [BODY]


def test_a_build_that_drops_the_key_is_not_trusted_with_it(tmp_path: Path) -> None:
    old, new = ContractEngine("vllm"), ContractEngine("vllm")
    old.carrying = old.carrying - {"/v1/messages"}
    with station([old, new], tmp_path) as running:
        assert [running.post("/v1/messages", BODY)[0] for _ in range(4)] == [200] * 4
        assert old.seen == [] and len(new.seen) == 4
        new.carrying = old.carrying  # another build under the same address
        new.restart()
        eventually(lambda: any("started anew" in line for line in running.lines))
        eventually(lambda: any("serves version 0 again" in line for line in running.lines))
        assert running.post("/v1/messages", BODY)[0] == 403
        assert running.complete()[0] == 200


def test_a_route_is_closed_for_good_only_where_no_engine_takes_a_key() -> None:
    one, other = Upstream("one", fence="", keyed=frozenset({"/x"})), Upstream("other", fence="")
    upstreams = Upstreams([one, other])
    assert upstreams.choose(keyed="/x") is one
    with pytest.raises(Unavailable, match="try again"):
        upstreams.choose(frozenset({one}), keyed="/x")
    one.fence = "one started anew"
    assert upstreams.choose() is other
    with pytest.raises(Unavailable, match="one started anew"):
        upstreams.choose(keyed="/x")
    one.keyed = frozenset()
    with pytest.raises(Keyless):
        upstreams.choose(keyed="/x")


@pytest.mark.parametrize("fault", ["500", "refuse", "unsuccessful"])
def test_an_engine_that_does_not_describe_itself_takes_keys_where_all_builds_do(fault: str, tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    engine.faults["/openapi.json"] = fault
    with station([engine], tmp_path) as running:
        assert running.complete()[0] == 200
        assert running.post("/v1/messages", BODY)[0] == 403


@pytest.mark.parametrize("kind", list(KEYS))
def test_a36_what_an_engine_computed_before_it_was_loaded_is_forgotten(kind: str, tmp_path: Path) -> None:
    engine = ContractEngine(kind)
    with engine.serving():
        running = Station([engine], tmp_path, mode=CommitMode.DRAIN)
        try:
            assert straight(running, "/v1/completions") == 0, "by a sidecar before this one, for example"
            running.versions.next()
            running.seed()
            assert running.post("/v1/completions", BODY)[1]["cached_under"] == 1
            engine.faults[RESET[kind]] = "500"  # so it is not brought back before it has this in its cache
            engine.restart()
            eventually(lambda: running.get("/health")[0] == 503)
            engine.cache[("", "hello")] = 0
            engine.faults.clear()
            eventually(lambda: running.get("/health")[0] == 200)
            assert running.post("/v1/completions", BODY)[1]["cached_under"] == 1
        finally:
            running.close()


def test_a_reset_reaches_what_lies_beside_the_prefix_cache(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, mode=CommitMode.DRAIN) as running:
        running.step()
        assert {"/reset_prefix_cache", "/reset_encoder_cache"} <= {*running.engine.calls}
        assert running.engine.outside is None, "what a connector holds outside the engine"


@pytest.mark.parametrize("engine", list(KEYS))
def test_the_table_says_what_the_engines_do(engine: str) -> None:
    key, carrying = CARRYING[engine]
    assert KEYS[engine] == key
    for path in GENERATING:
        cache = ROUTES[path].cache(engine)
        if cache is Cache.UNUSED:
            assert path == "/tokenize"
        elif cache is not Cache.DECLARED:
            assert (cache is Cache.KEYED) == (path in carrying), path
    assert all(route.cache("local") is Cache.UNUSED for route in ROUTES.values()), "it has no prefix cache"
    for path, route in ROUTES.items():
        assert route.kind is not Kind.UPLOAD or route.cache(engine) is Cache.KEYLESS, f"{path} is passed on unread"


def described(schema: Any, **schemas: Any) -> Any:
    body = {"content": {"application/json": {"schema": schema}}}
    return {"paths": {"/x": {"post": {"requestBody": body}}}, "components": {"schemas": schemas}}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def nested(depth: int) -> Any:
    return {"anyOf": [nested(depth - 1)]} if depth else {"properties": {"key": {}}}


KEYED = {"properties": {"key": {}}}
WIDE = {f"A{number}": {"anyOf": [ref(f"A{number + 1}")] * 5000} for number in range(3)} | {"A3": KEYED}
LONG = {f"A{number}": ref(f"A{number + 1}") for number in range(5000)} | {"A5000": KEYED}


@pytest.mark.parametrize(
    ("document", "declared"),
    [
        (described({"properties": {"key": {}}}), True),
        (described(ref("A"), A={"properties": {"key": {}}}), True),
        (described({"anyOf": [ref("A"), ref("A")]}, A={"properties": {"key": {}}}), True),
        (described({"anyOf": [ref("A"), ref("B")]}, A={"properties": {"key": {}}}, B={"properties": {}}), False),
        (described({"oneOf": [ref("A"), {"type": "null"}]}, A={"properties": {"key": {}}}), False),
        (described(ref("A"), A=ref("A")), False),
        (described(ref("B")), False),
        (described(ref("A0"), **WIDE), True),
        (described(ref("A0"), **LONG), False),
        (described(nested(480)), False),
        *((json.loads(text), False) for text in ("null", "[]", '{"paths": []}', '{"paths": {"/x": {"post": 1}}}')),
    ],
)
def test_a_route_declares_a_member_when_every_alternative_does(document: Any, declared: bool) -> None:
    assert routes_declaring("key", document) == ({"/x"} if declared else set())
