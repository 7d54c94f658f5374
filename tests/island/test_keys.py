"""The island's own key, and credentials that take each other's place without ever locking it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mailboat.client import Api
from mailboat.identity import fingerprint, new_key, proves_enrolment, public_half, sign_enrolment
from mailboat.island.heads import Heads
from mailboat.island.keys import CredentialDamaged, Credentials, private_key, read_credential, write_credential
from mailboat.island.store import Store
from mailboat.manifest import HEAD_TYPE, Envelope, Head


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def api() -> Api:
    return Api("http://127.0.0.1:1", "harbour", "old")


def test_the_key_is_made_once_and_private(store: Store) -> None:
    key = private_key(store)
    assert private_key(store) == key and len(key) == 64
    assert (store.root / "key.json").stat().st_mode & 0o777 == 0o600


def test_a_signature_is_for_one_project_and_one_token() -> None:
    key, other = new_key(), new_key()
    signature = sign_enrolment(key, "harbour", "token")
    assert proves_enrolment(public_half(key), signature, "harbour", "token")
    for public, project, token in (
        (public_half(other), "harbour", "token"),
        (public_half(key), "elsewhere", "token"),
        (public_half(key), "harbour", "token2"),
        ("zz", "harbour", "token"),
        ("", "harbour", "token"),
    ):
        assert not proves_enrolment(public, signature, project, token)
    assert not proves_enrolment(public_half(key), "", "harbour", "token")


def test_fingerprints_are_written_as_openssh_does() -> None:
    assert fingerprint("00" * 32) == "SHA256:Zmh6rfhivXdsj8GLjp+OIAiXFIVu4jOzkCpZHQ1fKSU"


def test_a_new_credential_is_tried_and_takes_the_place_of_the_old_one(store: Store) -> None:
    write_credential(store, {"credential": "old", "server": "s"})
    calls = api()
    credentials = Credentials(store, calls)
    assert not credentials.on_trial
    credentials.offered("new")
    assert calls.token == "new" and credentials.on_trial
    assert read_credential(store) == {"credential": "old", "next": "new", "server": "s"}
    credentials.accepted()
    assert read_credential(store) == {"credential": "new", "server": "s"}
    assert not credentials.refused() and calls.token == "new"


def test_a_refused_one_goes_back_to_the_old_one(store: Store) -> None:
    write_credential(store, {"credential": "old"})
    calls = api()
    credentials = Credentials(store, calls)
    credentials.offered("lost")
    credentials.offered("new")
    assert credentials.refused() and calls.token == "old"
    assert read_credential(store) == {"credential": "old"}
    assert not credentials.refused()


def test_a_restart_in_between_tries_the_new_one_first(store: Store) -> None:
    write_credential(store, {"credential": "old"})
    Credentials(store, api()).offered("new")
    calls = api()
    again = Credentials(store, calls)
    assert calls.token == "new" and again.on_trial
    assert again.refused() and calls.token == "old"


def test_every_flipped_byte_and_every_cut_of_the_credential_is_noticed(store: Store) -> None:
    path = store.root / "credential.json"
    body = {"credential": "old", "island": "7", "pending": False, "server": "s"}
    write_credential(store, body)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CredentialDamaged, match="put the file back"):
                read_credential(store)
    path.write_bytes(whole)
    assert read_credential(store) == body
    path.unlink()
    assert read_credential(store) is None


def test_a_credential_from_before_there_were_digests_is_taken(store: Store) -> None:
    store.set_note("credential", {"credential": "old", "server": "s"})
    assert read_credential(store) == {"credential": "old", "server": "s"}


def test_a53_the_marks_of_two_channels_are_kept_apart(store: Store) -> None:
    """Pinning must not open a way for an old head of the channel that was left."""
    home, pin = Heads(store, RUN, "latest", clock=clock), Heads(store, RUN, "island-1", home=False, clock=clock)
    home.accept(head("latest", 5))
    pin.accept(head("island-1", 1))
    with pytest.raises(Exception, match="older"):
        Heads(store, RUN, "latest", clock=clock).accept(head("latest", 4))
    with pytest.raises(Exception, match="older"):
        Heads(store, RUN, "island-1", home=False, clock=clock).accept(head("island-1", 0))


RUN = "6f9619ff-8b86-d011-b42d-00c04fc964ff"


def clock() -> float:
    return 1000.0


def head(channel: str, serial: int) -> Envelope:
    return Envelope.wrap(
        HEAD_TYPE,
        Head(
            run=RUN,
            channel=channel,
            version=1,
            epoch=0,
            manifest="a" * 64,
            state="b" * 64,
            generation=1,
            serial=serial,
            issued=1000,
            expires=2000,
        ).to_bytes(),
    )
