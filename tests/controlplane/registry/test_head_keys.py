"""Heads are signed by every head key of today, and a rotation leaves a way from the old one to the new one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane import env, head_keys
from controlplane.registry import beside, services
from controlplane.registry.models import Channel, Run
from mailboat.identity import new_key, public_half
from mailboat.manifest import Envelope
from mailboat.signing import HEAD, KeyDocument, endorsers, signers
from tests.controlplane.making import ready

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAILBOAT_HOME", str(tmp_path / "secret home"))
    monkeypatch.delenv("MAILBOAT_HEAD_KEYS", raising=False)
    return tmp_path / "secret home" / "secrets" / "head-keys"


def head(run: Run) -> Envelope:
    return Envelope.from_dict(Channel.objects.get(run=run, name="latest").head_envelope)


def test_a_rotation_overlaps_and_leaves_the_old_keys_word_for_the_new_one(run: Run, own_secrets: Path) -> None:
    ready(run, 0)
    (old,) = head_keys.public().values()
    assert signers(head(run), [old]) == {old}
    assert stat.S_IMODE(own_secrets.stat().st_mode) == 0o600
    call_command("head_keys", "add")
    assert stat.S_IMODE(own_secrets.stat().st_mode) == 0o600
    new = head_keys.public()[2]
    assert signers(head(run), [old, new]) == {old, new}
    document = KeyDocument(HEAD, None, new)
    envelope = beside.read_key(None, new)
    assert envelope is not None and endorsers(envelope, document, [old]) == {old}
    call_command("head_keys", "retire", "1")
    assert signers(head(run), [old, new]) == {new}
    assert beside.read_key(None, new) == envelope  # islands that were away find their way still
    assert Channel.objects.get(run=run).serial == 1
    with pytest.raises(CommandError, match="nothing was retired"):
        call_command("head_keys", "retire", "2")


def test_heads_from_before_a_change_of_keys_are_signed_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(run, 0)
    assert services.renew_heads() == 0
    private = new_key()
    monkeypatch.setenv("MAILBOAT_HEAD_KEYS", f"7:{private}")
    assert services.renew_heads() == 1
    assert signers(head(run), [public_half(private)])
    with pytest.raises(CommandError, match="MAILBOAT_HEAD_KEYS"):
        call_command("head_keys", "add")


@pytest.mark.parametrize(
    "value", ["1:abc", "0:" + "a" * 64, "x:" + "a" * 64, ",".join(f"{n}:{n}" + "a" * 63 for n in range(1, 6))]
)
def test_unreadable_keys_stop_the_start_with_a_sentence(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAILBOAT_HEAD_KEYS", value)
    with pytest.raises(env.EnvironmentProblem, match="MAILBOAT_HEAD_KEYS"):
        head_keys.current()
