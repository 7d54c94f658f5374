"""When an island sends its token: at its first start, and where its credential is refused for good; and how long it
waits for a server that is not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mailboat.errors import ApiError, Unreachable
from mailboat.island import enrolment
from tests.island.contract_server import ContractServer, Fault
from tests.island.fleet import Trainer, held_state, island

FOR_EVER = 1 << 30


def enrolments(server: ContractServer) -> int:
    """How often a token was sent."""
    return server.calls.count("POST islands/enrol")


def kept(store: Path) -> dict[str, Any]:
    """The credential in the store, with what belongs to it."""
    found: dict[str, Any] = json.loads((store / "credential.json").read_text())
    return found


def first_start(server: ContractServer, store: Path) -> None:
    """Enrols with the token "once" and catches up."""
    with island(server, store, once=True) as first:
        first.join()


def test_a_removed_island_comes_back_with_a_new_token_and_what_it_holds(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        first_start(server, store)
        server.refused, server.tokens, server.credential = {"secret"}, {"new"}, "fresh"
        trainer.step()
        server.calls.clear()
        with island(server, store, once=True, token="new") as back:
            back.join()
        assert server.applied(1)
        assert held_state(store) == trainer.state().digest
        fetched = {call.rpartition("/")[2] for call in server.calls if "/blobs/" in call}
        anchor = {file["sha256"] for file in server.versions[0].anchor or ()}
        assert anchor
        assert not fetched & anchor, "what it held is of use"
        assert kept(store)["credential"] == "fresh"
        server.calls.clear()
        trainer.step()
        with island(server, store, once=True, token="new") as again:
            again.join()
        assert not enrolments(server)
        assert server.applied(2)


def test_a_used_token_leaves_the_refused_credential_and_the_island_goes_on(
    server: ContractServer, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        first_start(server, store)
        before = kept(store)
        server.refused = {"secret"}
        with pytest.raises(ApiError, match="unauthorised"), island(server, store, once=True, token="used") as refused:
            refused.join()
        assert enrolments(server) == 2
        assert kept(store) == before
        assert any("held and verified after the start" in line for line in refused.lines)
        server.refused = set()
        with island(server, store, once=True, token="used") as believed:
            believed.join()


def test_the_token_that_an_island_enrolled_with_never_brings_it_back(server: ContractServer, tmp_path: Path) -> None:
    """A reusable key lies in the machine's start script: whom an operator removed must not come back by it."""
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        first_start(server, store)
        server.refused, server.tokens = {"secret"}, {"once"}
        with pytest.raises(ApiError, match="unauthorised"), island(server, store, once=True) as refused:
            refused.join()
    assert enrolments(server) == 1


@pytest.mark.parametrize(
    ("kind", "status"),
    [("refuse", 0), ("status", 401), ("status", 403), ("status", 404), ("status", 429), ("status", 500),
     ("status", 503)],
)  # fmt: skip
def test_trouble_that_may_pass_never_leads_to_a_new_enrolment(
    server: ContractServer, tmp_path: Path, kind: str, status: int
) -> None:
    """A 401 that is not the control plane's own (a gateway's) is such trouble too."""
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        first_start(server, store)
        before = kept(store)
        server.tokens = {"new"}
        server.faults = [Fault("GET islands/[^/]+", kind, status, times=FOR_EVER)]
        trainer.step()
        with island(server, store, once=True, token="new") as troubled:
            troubled.join()
    assert server.applied(1)
    assert enrolments(server) == 1
    assert kept(store) == before


def test_a_credential_on_trial_that_works_is_no_reason_to_enrol(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        first_start(server, store)
        server.refused, server.tokens = {"secret"}, {"new"}
        body = kept(store) | {"next": "rotated"}
        body.pop("sha256")
        (store / "credential.json").write_text(json.dumps(body))
        with island(server, store, once=True, token="new") as rotated:
            rotated.join()
    assert enrolments(server) == 1


def test_once_a_first_enrolment_gives_up_on_a_dead_address(server: ContractServer, tmp_path: Path) -> None:
    server.faults = [Fault("POST islands/enrol", "refuse", times=FOR_EVER)]
    with pytest.raises(Unreachable, match="can't be reached"), island(server, tmp_path / "store", once=True) as dead:
        dead.join()
    assert enrolments(server) == 6
    assert len(dead.lines) == 1, "that it waits"


def test_once_a_silent_address_is_given_up_by_the_clock(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "ONCE_SECONDS", 0.0)
    server.faults = [Fault("POST islands/enrol", "status", 503, times=FOR_EVER)]
    with pytest.raises(ApiError, match="on_order"), island(server, tmp_path / "store", once=True) as silent:
        silent.join()
    assert enrolments(server) == 1
