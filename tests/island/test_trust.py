"""What an island believes: signatures, keys that vouch for each other, and nothing that a hostile control plane, store
or worker says besides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mailboat.identity import new_key, public_half
from mailboat.manifest import MANIFEST_TYPE, Envelope, Head
from mailboat.signing import HEAD, PUBLISHER, KeyDocument, endorse, read_key, sign, write_key
from tests.island.contract_server import ContractServer, Fault
from tests.island.fleet import RunningIsland, Trainer, held_state, island


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The trainer's key."""
    path = tmp_path / "trainer.pem"
    write_key(path)
    return path


@pytest.fixture
def trainer(server: ContractServer, tmp_path: Path, key: Path) -> Iterator[Trainer]:
    """A trainer that signs, at a control plane that signs its heads."""
    server.head_keys = [new_key()]
    server.publishers = {public_half(read_key(key)): None}
    with Trainer(server, tmp_path, signing_key=key) as publishing:
        yield publishing


def given(key: Path) -> dict[str, Any]:
    """The option of an island that trusts this key alone."""
    return {"publisher_keys": (public_half(read_key(key)),)}


def alarmed(server: ContractServer, words: str) -> dict[str, Any]:
    """The first heartbeat with such an alarm."""
    return server.wait_for(lambda: next((b for b in server.beats if words in b.get("alarm", "")), None))


def calm(server: ContractServer) -> None:
    """Waits until the newest heartbeat has no alarm."""
    server.wait_for(lambda: server.beats[-1].get("alarm") == "")


@contextmanager
def following(server: ContractServer, trainer: Trainer, store: Path, **options: Any) -> Iterator[RunningIsland]:
    """An island that holds the trainer's first version."""
    trainer.step()
    with island(server, store, **options) as running:
        server.wait_for(lambda: server.applied(0))
        yield running


def test_signed_versions_are_followed_and_the_keys_reported(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    with following(server, trainer, tmp_path / "store", **given(key)):
        trainer.step()
        server.wait_for(lambda: server.applied(1))
        server.wait_for(lambda: server.beats[-1].get("trusted_keys") == list(given(key)["publisher_keys"]))
    assert held_state(tmp_path / "store") == trainer.state().digest


def unsigned(server: ContractServer) -> Envelope:
    return Envelope.wrap(MANIFEST_TYPE, server.versions[1].envelope.payload)


def forged(server: ContractServer) -> Envelope:
    return sign(unsigned(server), new_key())


@pytest.mark.parametrize("tamper", [unsigned, forged])
def test_a53_a_version_without_the_publishers_signature_is_refused(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path, tamper: Callable[[ContractServer], Envelope]
) -> None:
    with following(server, trainer, tmp_path / "store", **given(key)):
        held = held_state(tmp_path / "store")
        server.on_call = lambda call: (
            setattr(server.versions[1], "envelope", tamper(server)) if call.endswith("versions/1/manifest") else None
        )
        trainer.step()
        alarmed(server, "a publisher that this island trusts")
        assert held_state(tmp_path / "store") == held and not server.applied(1)
        server.on_call = lambda _call: None
        server.versions[1].envelope = sign(unsigned(server), read_key(key))
        server.wait_for(lambda: server.applied(1))
        calm(server)


def test_a53_tampered_blobs_and_manifests_are_refused(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    with following(server, trainer, tmp_path / "store", **given(key)):
        held = held_state(tmp_path / "store")
        server.faults = [Fault(r"GET runs/voyage/blobs/[0-9a-f]+", "flip", at=9, times=1 << 30)]
        trainer.step()
        alarmed(server, "another digest")
        assert held_state(tmp_path / "store") == held and not server.applied(1)
        server.faults = []
        server.wait_for(lambda: server.applied(1))
        calm(server)


def older(server: ContractServer, head: Head) -> Envelope:
    return ContractServer.signed_head(server, replace(head, serial=head.serial - 2))


def expired(server: ContractServer, head: Head) -> Envelope:
    now = int(time.time())
    return ContractServer.signed_head(server, replace(head, issued=now - 9000, expires=now - 5000))


def bare(server: ContractServer, head: Head) -> Envelope:
    return Envelope.wrap(ContractServer.signed_head(server, head).payload_type, head.to_bytes())


def strange(server: ContractServer, head: Head) -> Envelope:
    return sign(bare(server, head), new_key())


def altered(server: ContractServer, head: Head) -> Envelope:
    right = ContractServer.signed_head(server, head)
    return Envelope(right.payload_type, replace(head, expires=head.expires + 9).to_bytes(), right.signatures)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (older, "older than"),
        (expired, "expired"),
        (bare, "is not signed by the control plane"),
        (strange, "no right signature of the control plane"),
        (altered, "no right signature of the control plane"),
    ],
)
def test_a53_heads_that_are_replayed_expired_or_not_signed_are_refused(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path, lie: Any, words: str
) -> None:
    with following(server, trainer, tmp_path / "store", **given(key)):
        held = held_state(tmp_path / "store")
        server.signed_head = lambda head: lie(server, head)  # type: ignore[method-assign]
        trainer.step()
        alarmed(server, words)
        assert held_state(tmp_path / "store") == held and not server.applied(1)
        del server.signed_head
        server.wait_for(lambda: server.applied(1))
        calm(server)


def test_the_first_keys_met_are_pinned_and_later_words_change_nothing(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    with following(server, trainer, tmp_path / "store"):
        server.wait_for(lambda: server.beats[-1].get("trusted_keys") == list(server.publishers))
    other = tmp_path / "other.pem"
    write_key(other)
    server.publishers = {public_half(read_key(other)): None}
    server.head_keys = [*server.head_keys, new_key()]
    with island(server, tmp_path / "store") as running:
        trainer.publisher._signing_key = read_key(other)  # whoever took the control plane over publishes
        trainer.step()
        alarmed(server, "a publisher that this island trusts")
        assert not server.applied(1), running.lines


def test_a_rotated_key_is_trusted_through_the_ones_before_it(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    second, third = tmp_path / "second.pem", tmp_path / "third.pem"
    for path in (second, third):
        write_key(path)
    with following(server, trainer, tmp_path / "store", **given(key)):
        for path, before in ((second, key), (third, second)):
            document = KeyDocument(PUBLISHER, server.run_id, public_half(read_key(path)))
            server.publishers[document.public_key] = endorse(document, read_key(before))
        trainer.publisher._signing_key = read_key(third)
        trainer.step()
        server.wait_for(lambda: server.applied(1))
        server.revoked = [public_half(read_key(key))]
        server.wait_for(lambda: len(server.beats[-1].get("trusted_keys", ())) == 2)
        trainer.publisher._signing_key = read_key(key)
        trainer.step()
        alarmed(server, "a publisher that this island trusts")
        assert not server.applied(2)
        trainer.publisher._signing_key = read_key(second)
        trainer.step()
        server.wait_for(lambda: server.applied(3))  # past a version that it could not go to: proven as a whole
    assert held_state(tmp_path / "store") == trainer.state().digest
    with island(server, tmp_path / "store", **given(key)) as running:  # what it holds it keeps
        server.wait_for(lambda: any("version 3  held" in line for line in running.lines))


def test_head_keys_rotate_without_touching_islands(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    old, new = server.head_keys[0], new_key()
    document = KeyDocument(HEAD, None, public_half(new))
    with following(server, trainer, tmp_path / "store", **given(key)):
        server.head_documents[document.public_key] = endorse(document, old)
        server.head_keys = [old, new]
        trainer.step()
        server.wait_for(lambda: server.applied(1))
        server.head_keys = [new]
        trainer.step()
        server.wait_for(lambda: server.applied(2))
        server.head_keys = [old]  # retired: whoever finds it in an old backup has found nothing
        trainer.step()
        alarmed(server, "no right signature of the control plane")
        assert not server.applied(3)


def test_what_is_held_is_judged_again_by_the_keys_that_are_given(
    server: ContractServer, tmp_path: Path, key: Path
) -> None:
    server.head_keys = [new_key()]
    with Trainer(server, tmp_path) as trainer, following(server, trainer, tmp_path / "store"):
        pass
    with island(server, tmp_path / "store", **given(key)) as running:
        alarmed(server, "a publisher that this island trusts")
        assert any("is given up" in line for line in running.lines)
        server.wait_for(lambda: server.beats[-1]["version"] is None)
        server.versions.clear()
        server.reports.clear()
        with Trainer(server, tmp_path / "again", signing_key=key) as signing:
            signing.step()
            server.wait_for(lambda: server.applied(0))


def test_pins_outlive_a_start_without_the_option(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    with following(server, trainer, tmp_path / "store", **given(key)):
        pass
    note = json.loads((tmp_path / "store" / "trust.json").read_text())
    assert list(note["publishers"]) == list(given(key)["publisher_keys"])
    trainer.publisher._signing_key = None
    with island(server, tmp_path / "store"):
        trainer.step()
        alarmed(server, "is not signed by a publisher")
        assert not server.applied(1)


def test_a_plan_that_leads_elsewhere_is_refused(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    """The head's manifest is the publisher's, the plan's is a hostile control plane's with the same number."""
    with following(server, trainer, tmp_path / "store", **given(key)):
        held = held_state(tmp_path / "store")
        plan = server.plan

        def lie(origin: int | None, to: int) -> dict[str, Any]:
            told = plan(origin, to)
            other = replace(server.versions[to].manifest, state="0" * 64)
            told["steps"][-1]["manifest"] = server.put(other.to_bytes())
            return told

        server.plan = lie  # type: ignore[method-assign]
        trainer.step()
        alarmed(server, "another manifest than the one that was named")
        assert held_state(tmp_path / "store") == held and not server.applied(1)
        del server.plan
        server.wait_for(lambda: server.applied(1))


def test_a_derived_run_is_followed_by_islands_alone_that_name_its_workers_key(
    server: ContractServer, trainer: Trainer, key: Path, tmp_path: Path
) -> None:
    server.derived = True
    trainer.step()
    with island(server, tmp_path / "store"):
        alarmed(server, "The run is derived")
        assert not server.applied(0)
    with island(server, tmp_path / "store", **given(key)):
        server.wait_for(lambda: server.applied(0))
