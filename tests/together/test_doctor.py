"""`mailboat doctor` and `mailboat status` against the real server."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mailboat import __version__, diagnosis
from mailboat.cli import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), standalone_mode=False)


@pytest.fixture
def harbour(server: str) -> dict[str, Any]:
    """A project with a run, a version, an island and tokens."""
    from controlplane.accounts import services as accounts
    from controlplane.registry import services as registry
    from tests import factories

    project = registry.create_project("harbour", actor="test")
    run = registry.create_run(project, "voyage", actor="test")
    versions = factories.create_line(run, 3)
    island = factories.mk_island(run, "porto", at=versions[0])
    token, viewer = accounts.create_token(project, "viewer", "eyes", actor="test", lifetime=timedelta(days=3))
    return {"server": server, "token": token, "viewer": viewer, "island": island}


def doctor(harbour: dict[str, Any], *more: str, token: str = "", project: str = "harbour") -> Result:
    text = token or harbour["viewer"]
    return call("doctor", "--server", harbour["server"], "--project", project, "--token", text, *more)


def test_doctor_finds_a_healthy_server(harbour: dict[str, Any], tmp_path: Path) -> None:
    done = doctor(harbour, "--run", "voyage", "--store", str(tmp_path / "deep" / "store"))
    assert done.return_value == 0, done.output
    assert "is ready" in done.output
    assert "role viewer in harbour" in done.output and "expires in 3 days" in done.output
    assert f"the server is {__version__}: they work together" in done.output
    for what in ("clock", "disk", "memory", "processor", "compiled"):
        assert f"  {what}" in done.output
    assert harbour["viewer"] not in done.output
    assert not (tmp_path / "deep").exists()


def test_doctor_says_what_is_wrong_with_a_token(harbour: dict[str, Any]) -> None:
    from controlplane.accounts import services as accounts

    assert "does not open project elsewhere" in doctor(harbour, project="elsewhere").output
    accounts.revoke_token(harbour["token"], actor="test")
    done = doctor(harbour)
    assert done.return_value == 1
    assert "wrong, expired or revoked; ask an admin" in done.output


def test_doctor_without_a_server_to_be_found() -> None:
    done = call("doctor", "--server", "http://127.0.0.1:9", "--token", "x")
    assert done.return_value == 1
    assert "can't be reached" in done.output
    assert "token" not in done.output.replace("MAILBOAT_TOKEN", "")


def test_doctor_without_a_server_looks_at_the_machine() -> None:
    done = call("doctor")
    assert done.return_value == 0
    assert "cores" in done.output


@pytest.mark.parametrize(("date", "level"), [(-10, "ok"), (100, "warn"), (1000, "fail")])
def test_a46_doctor_compares_clocks(date: int, level: str) -> None:
    import time
    from email.utils import formatdate

    now = time.time()
    found = diagnosis._clock(formatdate(now - date, usegmt=True), now, 0.02)
    assert found.level == level
    assert ("behind" if date < 0 else "ahead of") in found.sentence
    assert diagnosis._clock(formatdate(now, usegmt=True), now, 0.02).level == "ok"
    assert diagnosis._clock("yesterday", now, 0.02).level == "warn"


def test_doctor_knows_a_release_that_does_not_fit(harbour: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mailboat.diagnosis.__version__", "7.3.0")
    done = doctor(harbour)
    assert done.return_value == 1
    assert "install a neighbour" in done.output


def test_status_prints_the_fleet(harbour: dict[str, Any]) -> None:
    options = ["--server", harbour["server"], "--project", "harbour", "--token", harbour["viewer"]]
    done = call("status", *options)
    assert done.exception is None, done.exception
    head, columns, porto = done.output.splitlines()
    assert head == "voyage/latest: version 2"
    assert columns.split()[:4] == ["island", "health", "sync", "version"]
    assert porto.split()[:5] == ["porto", "healthy", "behind", "0", "2"]
    assert json.loads(call("status", *options, "--json").output)["islands"][0]["name"] == "porto"


def test_an_island_of_another_age_is_refused_and_an_upgrade_is_seen(harbour: dict[str, Any]) -> None:
    from controlplane.fleet import services as fleet
    from controlplane.fleet.enrolment import AgentIncompatible
    from controlplane.fleet.models import Island
    from mailboat.client import Api

    run = harbour["island"].run
    channel = run.channels.get(name="latest")
    _, text = fleet.create_enrolment_token(run, channel, "faro", actor="test")
    with pytest.raises(AgentIncompatible):
        fleet.enrol("harbour", text, agent_version="7.3.0")
    island, credential = fleet.enrol("harbour", text, agent_version="0.0.9")  # the token was not used up
    beat = {"version": None, "digest": None, "epoch": None, "phase": "idle", "reason": "", "time": 0.0}
    Api(harbour["server"], "harbour", credential).heartbeat(str(island.pk), beat)
    assert Island.objects.get(pk=island.pk).agent_version == __version__


def test_plan_shows_steps_bytes_and_seconds(harbour: dict[str, Any]) -> None:
    def plan(*more: str) -> Result:
        return call(
            "plan", "voyage", "--server", harbour["server"], "--project", "harbour", "--token", harbour["viewer"], *more
        )

    done = plan("--from-version", "0", "--link-mbit", "8")
    shown = done.output.splitlines()
    assert shown, done.exception
    assert shown[0] == "from version 0 to version 2"
    assert [line.split()[:5] for line in shown[2:4]] == [
        ["step", "patch", "0", "to", "1"],
        ["step", "patch", "1", "to", "2"],
    ]
    assert shown[4].startswith("in sum 1.91 MiB, 2.")
    asked = json.loads(plan("--to", "1", "--json").output)
    assert [step["kind"] for step in asked["steps"]] == ["anchor", "patch"] and asked["from"] is None
    assert "nothing to do" in plan("--from-version", "2").output
    refused = plan("--from", "0" * 64)
    assert isinstance(refused.exception, Exception) and "No version of this run" in str(refused.exception)
    both = plan("--from", "0" * 64, "--from-version", "1")
    assert "either" in str(both.exception)
