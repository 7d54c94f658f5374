"""`mailboat keys` as the README writes it: the publisher's token in the environment, the operator's by `--token`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mailboat.cli import cli


def test_keys_are_registered_with_an_operators_token(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from controlplane.accounts import services as accounts
    from controlplane.registry import services as registry

    project = registry.create_project("harbour", actor="test")
    registry.create_run(project, "voyage", actor="test")
    token = {
        role: accounts.create_token(project, role, role, actor="test")[1] for role in ("publisher", "operator", "admin")
    }
    monkeypatch.chdir(tmp_path)
    for name, value in (("SERVER", server), ("PROJECT", "harbour"), ("TOKEN", token["publisher"])):
        monkeypatch.setenv(f"MAILBOAT_{name}", value)

    def call(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["keys", *arguments])
        return f"{done.exit_code} {done.output}{done.exception or ''}"

    assert call("new", "trainer.pem").startswith("0 ")
    assert "needs admin or operator" in call("register", "voyage", "trainer.pem.pub")
    assert call("register", "voyage", "trainer.pem.pub", "--token", token["operator"]).startswith("0 ")
    call("new", "next.pem")
    endorsed = ("register", "voyage", "next.pem.pub", "--endorsed-by", "trainer.pem", "--token", token["operator"])
    assert call(*endorsed).startswith("0 ")
    revoked = call("revoke", "voyage", "trainer.pem.pub", "--reason", "known", "--token", token["admin"])
    assert "revoked: known" in revoked
