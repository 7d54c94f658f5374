"""Runs, versions and replays."""

from __future__ import annotations

import re

from django.test import Client

from controlplane.jobs.models import Job
from controlplane.registry import deriving
from controlplane.registry.models import Anchor, Patch
from tests import factories as make
from tests.dashboard.conftest import World


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def test_run_page_shows_chart_with_its_numbers(world: World, owner: Client) -> None:
    page = _page(owner, world.pages["run"])
    assert page.count('class="dot"') == 3
    assert page.count('class="anchor-dot"') == 1
    assert "full checkpoint 42.9 MiB" in page
    assert "1,000,000" in page
    assert "2.22 %" in page


def test_range_of_the_chart_is_in_the_address(world: World, owner: Client) -> None:
    parent = world.versions[-1]
    for number in range(4, 40):
        parent = make.mk_version(world.run, number, parent=parent)
    assert _page(owner, world.url("runs/demo/?last=20")).count('class="dot"') == 20
    for nonsense in ("x", "-1", "5", "9" * 50):
        assert owner.get(world.url(f"runs/demo/?last={nonsense}&before={nonsense}")).status_code == 200


def test_what_routes_are_made_of_at_a_glance(world: World, owner: Client) -> None:
    zero, one, _, three = world.versions
    facts = {"run": world.run, "changed": 1}
    Patch.objects.create(from_version=zero, to_version=three, kind="merged", bytes=4 << 20, **facts)
    Patch.objects.create(from_version=one, to_version=three, kind="merged", bytes=5 << 20, **facts)
    Patch.objects.create(from_version=three, to_version=one, kind="reverse", bytes=6 << 20, **facts)
    Anchor.objects.create(version=three, kind="reference", uri="file:///base", files=[], bytes=43 << 20)
    part = _page(owner, world.pages["run"]).split('id="ways-title"')[1].split("</table>")[0]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in part.split("<tr>")[2:]]
    assert cells == [
        ["Step patches", "3", "2.86 MiB", "1 version"],
        ["Merged patches", "2", "9.00 MiB", "3 versions"],
        ["Reverse patches", "1", "6.00 MiB", "2 versions"],
        ["Anchors, uploaded", "1", "42.9 MiB", "–"],
        ["Anchors that lie elsewhere", "1", "43.0 MiB", "–"],
    ]


def test_versions_come_in_pages(world: World, owner: Client) -> None:
    parent = world.versions[-1]
    for number in range(4, 40):
        parent = make.mk_version(world.run, number, parent=parent)
    first = _page(owner, world.pages["run"])
    assert 'id="version-39"' in first
    assert 'id="version-14"' not in first
    assert "before=15" in first
    second = _page(owner, world.url("runs/demo/?before=15"))
    assert 'id="version-14"' in second
    assert 'id="version-0"' in second


def test_head_and_failed_state_with_reason(world: World, owner: Client) -> None:
    make.mk_version(world.run, 4, parent=world.versions[-1], state="failed", reason="Digest of b.weight differs.")
    page = _page(owner, world.pages["run"])
    row = page.split('id="version-4"')[1].split("</tr>")[0]
    assert "Failed" in row
    assert "Digest of b.weight differs." in row
    assert "/versions/4/replay/" not in row
    assert "latest" in page.split('id="version-3"')[1].split("</tr>")[0]


def test_version_page_tells_lineage_and_holders(world: World, owner: Client) -> None:
    page = _page(owner, world.url("runs/demo/versions/3/"))
    assert world.versions[3].state_digest in page
    assert 'href="/projects/harbour/runs/demo/versions/2/"' in page
    assert "fsn1-a" in page
    assert "45× smaller" in page
    anchor = _page(owner, world.url("runs/demo/versions/0/"))
    assert "42.9 MiB in 1 file" in anchor
    assert "none: the start of its run or epoch" in anchor


def test_replay_starts_a_job_and_a_second_one_joins_it(world: World, owner: Client) -> None:
    address = world.url("runs/demo/versions/3/replay/")
    first = owner.post(address)
    job = Job.objects.get(kind="replay", state="queued")
    assert first["Location"] == world.url(f"jobs/{job.pk}/")
    assert job.requested_by == "owner"
    second = owner.post(address, follow=True)
    assert second.redirect_chain[0][0] == first["Location"]
    assert "already under way" in second.content.decode()
    assert Job.objects.filter(kind="replay", state="queued").count() == 1


def test_replay_of_what_is_not_ready_is_refused_in_words(world: World, owner: Client) -> None:
    make.mk_version(world.run, 4, state="validating", parent=world.versions[-1])
    answer = owner.post(world.url("runs/demo/versions/4/replay/"), follow=True)
    assert "only ready versions can be replayed" in answer.content.decode()
    assert not Job.objects.filter(state="queued").exists()
    assert owner.post(world.url("runs/demo/versions/77/replay/")).status_code == 404


def test_run_list(world: World, owner: Client) -> None:
    make.mk_run(world.project, "empty")
    page = _page(owner, world.pages["runs"])
    assert "v3" in page.split("run-" + str(world.run.pk))[1].split("</tr>")[0]
    assert "empty" in page
    empty = _page(owner, world.url("runs/empty/"))
    assert "No version yet" in empty
    assert "Nothing to draw yet" in empty


def test_variants_stand_side_by_side(world: World, owner: Client) -> None:
    assert "the same versions in other served formats" not in owner.get(world.pages["run"]).content.decode()
    derived = deriving.create(world.project, "demo-fp8", "demo", "fp8-block", actor="test")
    make.mk_version(derived, 2, source=world.versions[2])
    page = " ".join(owner.get(world.pages["run"]).content.decode().split())
    table = page.split("the same versions in other served formats")[1]
    assert "demo-fp8" in table
    assert "fp8-block" in table
    assert "none" in table
    assert "demo-fp8" in owner.get(world.url("runs/demo-fp8/")).content.decode()
