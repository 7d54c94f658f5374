"""What operators do, with real islands on the real server: approval, pins, rotation, revocation, coming and going."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mailboat.errors import ApiError, Unauthorised
from tests.island.fleet import held_state, island
from tests.together.test_real_server import Harbour, harbour, weights  # noqa: F401  a fixture
from tests.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def order(harbour: Harbour, name: str, action: str, **body: Any) -> Any:  # noqa: F811
    rows = {row["name"]: row["id"] for row in harbour.operator.fleet()["islands"]}
    return harbour.operator._object("POST", f"islands/{rows[name]}/{action}", body)


def line(harbour: Harbour, name: str) -> Any:  # noqa: F811
    rows = {row["name"]: row for row in harbour.operator.fleet()["islands"]}
    return rows.get(name)


def test_a_self_enrolled_island_is_approved_by_its_fingerprint(harbour: Harbour, tmp_path: Path) -> None:  # noqa: F811
    key = harbour.operator.create_enrolment_token("voyage", "rack", reusable=True)
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "one", token=str(key["token"]), poll_seconds=1) as running,
    ):
        version = trainer.publish(weights())
        said = eventually(lambda: next((text for text in running.lines if "approve" in text), None))
        waiting = next(row for row in harbour.operator.fleet()["islands"] if row["pending"])
        assert waiting["fingerprint"] in said
        assert waiting["version"] is None
        with pytest.raises(ApiError) as refusal:
            order(harbour, waiting["name"], "approve", fingerprint="SHA256:something-else")
        assert refusal.value.code == "fingerprint_mismatch"
        order(harbour, waiting["name"], "approve", fingerprint=waiting["fingerprint"])
        eventually(lambda: harbour.at(waiting["name"]) == 0)
        assert held_state(tmp_path / "one") == version.digest
    with island(harbour.server, tmp_path / "one", token=None, once=True) as again:  # the approval is remembered
        again.join()


def test_a_pinned_island_goes_back_stays_and_catches_up(harbour: Harbour, tmp_path: Path) -> None:  # noqa: F811
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "one", token=harbour.enrol("skerry"), poll_seconds=60) as running,
    ):
        zero, _ = trainer.publish(weights()), trainer.publish(weights(1))
        eventually(lambda: harbour.at("skerry") == 1)
        order(harbour, "skerry", "pin", version=0, reason="version 1 is odd")
        eventually(lambda: harbour.at("skerry") == 0, 50)  # at once, although the poll takes a minute
        eventually(lambda: line(harbour, "skerry")["sync"]["state"] == "pinned")
        assert held_state(tmp_path / "one") == zero.digest
        trainer.publish(weights(2))
        order(harbour, "skerry", "unpin")
        eventually(lambda: harbour.at("skerry") == 2)
        assert not [text for text in running.lines if "failed" in text]
        eventually(lambda: line(harbour, "skerry")["sync"]["state"] == "current")


def test_a_credential_is_rotated_under_way_and_survives_a_restart(harbour: Harbour, tmp_path: Path) -> None:  # noqa: F811
    with harbour.publisher() as trainer:
        trainer.publish(weights())
        with island(harbour.server, tmp_path / "one", token=harbour.enrol("skerry"), poll_seconds=1) as running:
            eventually(lambda: harbour.at("skerry") == 0)
            before = line(harbour, "skerry")["credential"]["key_id"]
            order(harbour, "skerry", "rotate")
            eventually(lambda: line(harbour, "skerry")["credential"]["key_id"] != before)
            trainer.publish(weights(1))
            eventually(lambda: harbour.at("skerry") == 1)
            assert "got a new credential" in running.lines
        trainer.publish(weights(2))
    with island(harbour.server, tmp_path / "one", token=None, once=True) as again:
        again.join()
    assert harbour.at("skerry") == 2


def test_a51_an_island_that_is_revoked_while_it_runs_holds_still_and_serves(
    harbour: Harbour,  # noqa: F811
    tmp_path: Path,
) -> None:
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "one", token=harbour.enrol("skerry"), poll_seconds=1) as running,
    ):
        zero = trainer.publish(weights())
        eventually(lambda: harbour.at("skerry") == 0)
        order(harbour, "skerry", "revoke", reason="stolen")
        eventually(lambda: [text for text in running.lines if "revoked" in text])
        trainer.publish(weights(1))
        assert held_state(tmp_path / "one") == zero.digest
        assert line(harbour, "skerry")["health"]["state"] == "disabled"
    with pytest.raises(Unauthorised), island(harbour.server, tmp_path / "one", token=None, once=True) as again:
        again.join()


def test_a45_islands_come_and_go_and_nobody_else_notices(harbour: Harbour, tmp_path: Path) -> None:  # noqa: F811
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "one", token=harbour.enrol("skerry"), poll_seconds=1) as stays,
    ):
        for number in range(3):
            with island(harbour.server, tmp_path / f"guest{number}", token=harbour.enrol("guest"), poll_seconds=1):
                trainer.publish(weights(number))
                eventually(lambda n=number: harbour.at("guest") == n)
                eventually(lambda n=number: harbour.at("skerry") == n)
                order(harbour, "guest", "revoke")
            rows = {row["name"]: row["id"] for row in harbour.operator.fleet()["islands"]}
            harbour.operator.request("DELETE", f"islands/{rows['guest']}")
        assert [row["name"] for row in harbour.operator.fleet()["islands"]] == ["skerry"]
        assert not [text for text in stays.lines if "failed" in text]
