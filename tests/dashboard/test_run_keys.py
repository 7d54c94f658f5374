"""Publishers' keys on the pages: registered, revoked with a typed confirmation, and what islands trust beside them."""

from __future__ import annotations

from django.test import Client

from controlplane.audit.models import Entry
from controlplane.fleet.models import Island
from controlplane.registry.models import RunKey
from mailboat.identity import fingerprint
from tests.dashboard.conftest import World

KEY, OTHER = "ab" * 32, "cd" * 32


def registered(world: World, owner: Client, public: str = KEY, name: str = "trainer") -> RunKey:
    owner.post(world.url("runs/demo/keys/register/"), {"public_key": public, "name": name})
    return RunKey.objects.get(public_key=public)


def test_an_operator_registers_and_revokes_and_a_viewer_only_reads(world: World, owner: Client, mate: Client) -> None:
    assert "takes unsigned versions" in mate.get(world.pages["run"]).content.decode()
    key = registered(world, owner)
    page = mate.get(world.pages["run"]).content.decode()
    assert fingerprint(KEY) in page and "Revoke for good" not in page and "register-key" not in page
    revoke = world.url(f"runs/demo/keys/{key.pk}/revoke/")
    assert mate.post(revoke, {"typed": "trainer", "reason": "lost"}).status_code == 403
    for wrong in ({"typed": "trainee", "reason": "lost"}, {"typed": "trainer", "reason": " "}):
        owner.post(revoke, wrong)
        assert RunKey.objects.get().revoked_at is None
    owner.post(revoke, {"typed": "trainer", "reason": "the disk was lost"})
    page = owner.get(world.pages["run"]).content.decode()
    assert "owner: the disk was lost" in page and "Revoke for good" not in page
    assert Entry.objects.filter(action="key.revoke", actor="owner").exists()


def test_what_is_no_key_is_said_so(world: World, owner: Client) -> None:
    answer = owner.post(world.url("runs/demo/keys/register/"), {"public_key": "abc"}, follow=True)
    assert "64 hex digits" in answer.content.decode() and not RunKey.objects.exists()
    registered(world, owner)
    again = owner.post(world.url("runs/demo/keys/register/"), {"public_key": KEY.upper()}, follow=True)
    assert "has this key already" in again.content.decode()


def test_an_island_shows_what_it_trusts_and_what_it_refused(world: World, owner: Client) -> None:
    registered(world, owner)
    sentence = "The head is not signed by the control plane whose key this island has; it is refused."
    Island.objects.update(trusted_keys=[KEY, OTHER], alarm=sentence, alarm_at=world.island.enrolled_at)
    page = owner.get(world.pages["island"]).content.decode()
    assert fingerprint(KEY) in page and fingerprint(OTHER) in page
    assert "Not of this run" in page and sentence in page
    fleet = owner.get(world.pages["fleet"]).content.decode()
    assert "Refused" in fleet and sentence in fleet
