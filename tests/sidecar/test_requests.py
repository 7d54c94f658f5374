"""What requests may ask, what goes on to the engine, and what comes back: byte for byte but for what is ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat.island.sidecar.requests import JsonRequest
from mailboat.island.sidecar.routes import Kind, kind
from mailboat.island.sidecar.splice import edited, parse_object
from mailboat.island.sidecar.stamps import EventStamps, stamped
from mailboat.island.sidecar.types import Applied, BadConstraint, Constraint
from tests.engines.contract_engine import ContractEngine
from tests.sidecar.harness import station

APPLIED = Applied("voyage", "id", 0, 7, "ab" * 32, "x1")
MALFORMED = [
    "3", 3, True, [], [1], {"min_version": "3"}, {"min_version": 1.5}, {"min_version": -1}, {"exact_version": True},
    {"exact_version": 2**60}, {"exact_version": 10**40}, {"min_version": []}, {"latest": 1},
    {"min_version": 1, "x": None},
]  # fmt: skip


def test_a44_malformed_constraints_get_400_and_no_engine_sees_them(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for constraint in MALFORMED:
            status, body, _ = running.complete(weight_version=constraint)
            assert status == 400, constraint
            message = body["error"]["message"]
            assert message.endswith(".") and "\n" not in message and len(message) < 200
        for value in ("-1", "1.5", "x", "9" * 30, ""):
            status, body, _ = running.post("/v1/completions", {"prompt": "x"}, {"Mailboat-Min-Version": value})
            assert status == 400 and "Mailboat-Min-Version" in body["error"]["message"]
        assert running.complete(run_id=5)[0] == 400
        twice = b'{"prompt":"x","weight_version":null,"weight_version":null}'
        assert running.post("/v1/completions", twice)[0] == 400
        assert running.engine.seen == []
        for fine in (None, {}, {"min_version": None, "exact_version": None}, {"min_version": 9, "exact_version": 0}):
            assert running.complete(weight_version=fine)[0] == 200, fine
        assert len(running.engine.seen) == 4
        assert all("weight_version" not in body for body in running.engine.seen)


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=6),
            lambda inner: st.lists(inner, max_size=3),
        ),
        max_size=5,
    ),
    st.integers(0, 5),
    st.sampled_from([None, 0, 2]),
)
def test_the_rest_of_a_body_keeps_its_bytes(members: dict[str, object], place: int, indent: int | None) -> None:
    members = {key: value for key, value in members.items() if key not in {"weight_version", "run_id", "cache_salt"}}
    items = list(members.items())
    items.insert(min(place, len(items)), ("weight_version", {"min_version": 3}))
    raw = json.dumps(dict(items), indent=indent, ensure_ascii=False)
    try:
        data = raw.encode()
    except UnicodeEncodeError:
        return
    request = JsonRequest.versioned(data, Constraint())
    assert request.constraint == Constraint(minimum=3)
    assert json.loads(request.for_engine(APPLIED, None)) == members
    salted = json.loads(request.for_engine(APPLIED, "cache_salt"))
    assert salted == members | {"cache_salt": APPLIED.salt()}
    thing = parse_object(raw)
    assert thing is not None
    for member in thing.members:
        if member.key != "weight_version":
            assert raw[member.begin : member.end] in request.for_engine(APPLIED, None).decode()


def test_numbers_and_escapes_survive() -> None:
    text = '{"a":1.10,"weight_version":{},"b":"\\u00e9","c":1e5,"big":12345678901234567890123}'
    assert edited(text, parse_object(text), cut=frozenset({"weight_version"})) == text.replace(
        '"weight_version":{},', ""
    )  # type: ignore[arg-type]


PINNED = '{"prompt":"x","weight_version":{"exact_version":9}}'
UNREADABLE = [
    b"", b"[1]", b"{", b'{"a":1,}', b"\xff\xfe", b'{"weight_version":', b"nonsense", b"{}x",
    b"\xef\xbb\xbf" + PINNED.encode(), PINNED.encode("utf-16"), PINNED.encode("utf-16-le"), PINNED.encode("utf-32"),
    b'{"weight_version":{"exact_version":%s}}' % (b"9" * 5000), b'{"seed":%s}' % (b"9" * 5000),
    b'{"weight_version":%s}' % (b"[" * 2000 + b"]" * 2000), b'{"a":%s}' % (b'{"a":' * 2000 + b"1" + b"}" * 2000),
]  # fmt: skip


def test_a44_what_the_sidecar_cannot_read_gets_400_and_no_engine_sees_it(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for path in ("/v1/completions", "/v1/responses", "/v1/embeddings"):
            for raw in UNREADABLE:
                status, body, _ = running.post(path, raw)
                assert status == 400 and "JSON object in UTF-8" in body["error"]["message"], raw[:60]
        assert running.engine.seen == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings", "/score"])
def test_a_version_in_the_body_is_refused_where_it_is_not_known(path: str, tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for ours in ({"weight_version": {"min_version": 0}}, {"run_id": "voyage"}):
            status, body, _ = running.post(path, {"input": "x", **ours})
            assert status == 400 and "is not known on this route" in body["error"]["message"]
        assert running.post(path, {"input": "x"})[0] == 200
        assert running.post(path, {"input": "x"}, {"Mailboat-Min-Version": "9"})[0] == 409
        assert [set(body) for body in running.engine.seen] == [{"input", "cache_salt"}]


@pytest.mark.parametrize("name", ["weight_version", "run_id"])
def test_the_field_that_is_given_twice_is_named(name: str) -> None:
    other = ({"weight_version", "run_id"} - {name}).pop()
    with pytest.raises(BadConstraint, match=f"^{name} is given twice"):
        JsonRequest.versioned(f'{{"{other}":null,"{name}":null,"{name}":null}}'.encode(), Constraint())


def test_body_and_headers_must_agree() -> None:
    body = b'{"weight_version":{"min_version":3}}'
    assert JsonRequest.versioned(body, Constraint(minimum=3)).constraint == Constraint(minimum=3)
    assert JsonRequest.versioned(b"{}", Constraint(exact=4)).constraint == Constraint(exact=4)
    with pytest.raises(BadConstraint):
        JsonRequest.versioned(body, Constraint(minimum=4))


def test_clients_own_cache_keys_stay_apart() -> None:
    request = JsonRequest.versioned(b'{"extra_key":["a","b"],"prompt":"x"}', Constraint())
    assert json.loads(request.for_engine(APPLIED, "extra_key"))["extra_key"] == [
        APPLIED.salt("a"),
        APPLIED.salt("b"),
    ]
    later = replace(APPLIED, version=8)
    assert len({a.salt(own) for a in (APPLIED, later) for own in (None, "a", "b", 'a", "b')}) == 8


@pytest.mark.parametrize("own", ["me", "a/b", "x@y\\", "\ud800", "long" * 100])
def test_a_clients_cache_salt_keeps_vllms_rule(own: str, tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for _ in range(2):
            assert running.complete(cache_salt=own)[1]["cached_under"] == running.versions.number
            running.step()


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("own", ["", None, [], [""], [None]])
def test_an_empty_key_is_no_way_round_the_version(own: object, name: str) -> None:
    request = JsonRequest.versioned(json.dumps({name: own}).encode(), Constraint())
    sent = json.loads(request.for_engine(APPLIED, name))[name]
    assert sent == ([APPLIED.salt()] if own else APPLIED.salt())


NO_KEYS = [b"5", b"0", b"false", b"{}", b'[["a"]]', b'["a",1]', b"[" * 700 + b"]" * 700]


def test_what_is_no_key_gets_400_and_no_engine_sees_it(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        for own in NO_KEYS:
            status, body, _ = running.post("/v1/completions", b'{"prompt":"x","cache_salt":%s}' % own)
            assert status == 400 and body["error"]["message"].startswith("cache_salt must be"), own[:20]
        assert running.engine.seen == []


@pytest.mark.parametrize("path", ["/v1/responses", "/generate"])
def test_no_answer_is_made_after_its_request_ended(path: str, tmp_path: Path) -> None:
    with station([ContractEngine("sglang")], tmp_path) as running:
        for asked in (True, "true", 1):
            status, body, _ = running.post(path, {"prompt": "x", "background": asked})
            assert status == 400 and body["error"]["message"].startswith("background")
        assert running.engine.seen == []
        assert [running.post(path, {"prompt": "x", "background": no})[0] for no in (False, None)] == [200, 200]


def test_stamps_in_objects_batches_and_nothing_else() -> None:
    assert stamped(b'{"id": 1}', 3, 4) == b'{"id": 1,"weight_version_start":3,"weight_version_end":4}'
    batch = json.loads(stamped(b'[{"meta_info":{"a":1}},{"meta_info":{}}]', 3, 4))
    assert [item["meta_info"]["weight_version_end"] for item in batch] == [4, 4]
    forged = json.loads(stamped(b'{"weight_version_end":99,"a":[{"weight_version_end":5}]}', 3, 4))
    assert forged["weight_version_end"] == 4 and forged["a"] == [{"weight_version_end": 5}]
    for other in (b"[]x", b"3", b"", b'"x"', b"[1]", b"\xff"):
        assert stamped(other, 3, 4) == other


@given(st.integers(1, 7))
def test_events_are_stamped_wherever_the_pieces_are_cut(size: int) -> None:
    stream = (
        b'data: {"choices":[{"text":"a","finish_reason":null}]}\r\n\r\n: ping\n\n'
        b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    stamps = EventStamps(1, lambda: 2)
    out = b"".join(stamps.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + stamps.end()
    assert out == stream.replace(b'"stop"}]}', b'"stop"}],"weight_version_start":1,"weight_version_end":2}')


def test_the_end_of_a_responses_stream_is_stamped() -> None:
    stamps = EventStamps(1, lambda: 2)
    assert b"weight_version_end" not in stamps.feed(b'data: {"type":"response.created","response":{}}\n\n')
    assert b'"weight_version_end":2' in stamps.feed(b'data: {"type":"response.completed","response":{}}\n\n')


@pytest.mark.parametrize(
    ("method", "path", "raw", "expected"),
    [
        ("POST", "/v1/completions", b"/v1/completions", Kind.VERSIONED),
        ("POST", "/v1/embeddings", b"/v1/embeddings", Kind.INFERENCE),
        ("POST", "/v1/audio/translations", b"/v1/audio/translations", Kind.UPLOAD),
        ("GET", "/v1/models", b"/v1/models", Kind.OPEN),
        *(
            ("POST", path, path.encode(), Kind.BLOCKED)
            for path in (
                "/pause", "/resume", "/collective_rpc", "/update_weights", "/sleep", "/flush_cache",
                "/pause_generation",
                "/update_weights_from_disk", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache",
                "/abort_requests", "/anything/new", "/v1/../pause", "//pause",
            )
        ),
        *(
            (method, path, path.encode(), Kind.BLOCKED)
            for method in ("GET", "HEAD", "OPTIONS")
            for path in (
                "/release_memory_occupation", "/resume_memory_occupation", "/slow_down", "/freeze_gc", "/sleep",
                "/start_expert_distribution_record", "/stop_expert_distribution_record", "/wake_up", "/resume",
                "/dump_expert_distribution_record", "/clear_hicache_storage_backend", "/set_trace_level",
                "/remote_instance_transfer_engine_info", "/reset_prefix_cache", "/flush_cache", "/is_paused",
                "/get_server_info", "/docs", "/anything/new", "/v1/models/../sleep",
            )
        ),
        ("GET", "/v1/models/voyage", b"/v1/models/voyage", Kind.OPEN),
        ("HEAD", "/version", b"/version", Kind.OPEN),
        ("GET", "/v1/completions", b"/v1/completions", Kind.BLOCKED),
        ("OPTIONS", "/v1/completions", b"/v1/completions", Kind.OPEN),
        ("POST", "/v1/completions/../pause", b"/v1%2f..%2fpause", Kind.BLOCKED),
        ("DELETE", "/v1/files", b"/v1/files", Kind.BLOCKED),
    ],
)  # fmt: skip
def test_control_routes_are_closed(method: str, path: str, raw: bytes, expected: Kind) -> None:
    assert kind(method, path, raw) is expected


def test_a_websocket_is_refused_with_the_reason(tmp_path: Path) -> None:
    asked = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    with station([ContractEngine("vllm")], tmp_path) as running:
        for path in ("/v1/realtime", "/v1/models"):
            answer = running.pool.request("GET", running.url + path, headers=asked, timeout=30)
            assert answer.status == 403 and "WebSockets" in answer.json()["error"]["message"]


def test_blocked_routes_answer_403_and_reach_nothing(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        calls = list(running.engine.calls)
        for path in ("/pause", "/collective_rpc", "/update_weight_version", "/v1/%2e%2e/pause"):
            status, body, _ = running.post(path, {})
            assert (status, body["error"]["type"]) == (403, "RouteBlocked")
        assert running.get("/sleep")[0] == running.get("/resume")[0] == 403
        assert running.engine.calls == calls
