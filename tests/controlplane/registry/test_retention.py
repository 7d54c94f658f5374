"""Retention: what stays, what goes, and that every version that stays can still be reached."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.dashboard.rows import runs as rows
from controlplane.fleet import selectors
from controlplane.fleet import services as fleet
from controlplane.registry import beside, blobs, heads, keeping, leases, retention, routes, services, steering
from controlplane.registry.models import Anchor, Blob, Channel, Patch, Run, Tombstone, Upload, Version
from tests import factories as make
from tests.controlplane.conftest import enrol
from tests.controlplane.making import build, commit, ready, series, upload

pytestmark = pytest.mark.django_db


def limit(run: Run, **settings: Any) -> Run:
    Run.objects.filter(pk=run.pk).update(**settings)
    run.refresh_from_db()
    return run


def collect(run: Run) -> retention.Collection:
    return retention.collect(run, job=None, actor="test", check=lambda _: None)


def states(run: Run) -> str:
    letters = {"ready": "R", "retired": "-", "failed": "x"}
    return "".join(letters.get(v.state, "?") for v in Version.objects.filter(run=run).order_by("number"))


def anchored_series(run: Run, length: int, *anchors: int) -> list[Version]:
    """Ready versions with anchors at 0 and where told; merging has tests of its own."""
    Run.objects.filter(pk=run.pk).update(merge_up_to=0)
    versions: list[Version] = []
    for number in range(length):
        parent = versions[-1] if versions else None
        versions.append(ready(run, number, parent, anchored=number == 0 or number in anchors))
    return versions


def require_whole(run: Run) -> None:
    """Every ready version can be reached from nothing, and every blob of the route is in the store."""
    for version in Version.objects.filter(run=run, state="ready"):
        for step in routes.find(run, "", version.number).steps:
            for file in step["files"] if step["kind"] == "anchor" else step["parts"]:
                assert blobs.store().size(run.pk, file["sha256"]) == file["size"]
        assert blobs.store().size(run.pk, version.manifest_sha256) is not None
        assert blobs.store().size(run.pk, version.digests_sha256) is not None


def test_without_a_limit_everything_stays(run: Run) -> None:
    anchored_series(run, 4, 2)
    assert retention.preview(run).nothing
    assert collect(run).nothing
    assert states(run) == "RRRR"


def test_a23_the_newest_stay_with_their_way_from_an_anchor(run: Run) -> None:
    versions = anchored_series(run, 8, 4)
    limit(run, keep_versions=2)
    shown = retention.preview(run)
    assert shown.numbers == (0, 1, 2, 3)
    assert shown.bytes > 0
    before = Blob.objects.filter(run=run).count()
    gone = collect(run)
    assert (gone.numbers, gone.bytes, gone.blobs) == (shown.numbers, shown.bytes, shown.blobs)
    assert states(run) == "----RRRR"
    assert Blob.objects.filter(run=run).count() == before - len(gone.blobs)
    for sha256 in gone.blobs:
        assert blobs.store().size(run.pk, sha256) is None
    stone = Tombstone.objects.get(run=run, sha256=versions[0].manifest_sha256)
    assert stone.cleared_at is not None
    require_whole(run)
    old = Version.objects.get(run=run, number=1)
    assert (old.state_digest, old.patch_bytes) == (versions[1].state_digest, versions[1].patch_bytes), "it is told of"
    assert collect(run).nothing


def test_a23_age_keeps_as_well(run: Run) -> None:
    versions = anchored_series(run, 6, 3)
    Version.objects.filter(pk__in=[v.pk for v in versions[:5]]).update(state="ready")
    limit(run, keep_versions=1, keep_days=1)
    assert retention.preview(run).nothing, "all are of today"


def test_a12_what_channels_leases_and_epochs_need_stays(run: Run) -> None:
    versions = anchored_series(run, 9, 2, 4, 6, 8)
    steering.create_channel(run, "stable", version=5, protected=True, reason="", actor="test")
    leases.take(versions[2], "evaluator", timedelta(hours=1))
    limit(run, keep_versions=1)
    collect(run)
    assert states(run) == "--R-RR--R"
    require_whole(run)
    type(leases.take(versions[2], "x", timedelta(0))).objects.update(expires_at=Now() - timedelta(seconds=1))
    assert leases.forget_ended() == 2
    assert retention.preview(run).numbers == (2,)


@pytest.mark.parametrize("leave", [fleet.unpin, fleet.remove])
def test_a_pin_keeps_its_version_until_the_island_leaves_it(run: Run, leave: Callable[..., Any]) -> None:
    anchored_series(run, 8, 4)
    island, _ = enrol(run, "porto")
    fleet.pin(island, 2, actor="test")
    limit(run, keep_versions=2)
    assert retention.preview(run).numbers == (3,), "0 has the anchor of 2, and 4 that of the newest"
    fleet.revoke_credential(island, actor="test")
    leave(selectors.island(run.project, island.pk), actor="test")
    collect(run)
    assert states(run) == "----RRRR"
    channel = Channel.objects.get(run=run, name__startswith=Channel.PINS)
    assert channel.serial == 1, "it goes on from there if the island is pinned again"
    Channel.objects.filter(pk=channel.pk).update(expires_at=Now())
    assert heads.renew_heads() == 1
    assert blobs.store().documents(f"runs/{run.pk}/versions/") == {f"{number}.json" for number in range(4, 8)}
    beside.write_head(channel)
    assert "2.json" not in blobs.store().documents(f"runs/{run.pk}/versions/"), "no plan leads over it"
    version = Version.objects.get(run=run, number=2)
    assert rows.lineage(version)["channels"] == []
    assert not any(row.channels for row in rows.version_rows(run, None)[0] if row.version == version)
    require_whole(run)


def test_a12_a_live_island_keeps_its_way(run: Run) -> None:
    versions = anchored_series(run, 7, 3, 6)
    make.mk_island(run, "porto", at=versions[4])
    limit(run, keep_versions=1)
    collect(run)
    assert states(run) == "----RRR"
    left = Patch.objects.filter(run=run).order_by("to_version__number")
    assert list(left.values_list("from_version__number", "to_version__number")) == [(4, 5), (5, 6)]


def test_a48_an_island_that_was_long_away_starts_from_an_anchor(run: Run) -> None:
    versions = anchored_series(run, 7, 3, 6)
    away = make.mk_island(run, "porto", at=versions[1])
    type(away).objects.update(last_seen_at=Now() - timedelta(days=3))
    limit(run, keep_versions=1)
    collect(run)
    assert states(run) == "------R"
    for held in (versions[1].state_digest, ""):
        assert [step["kind"] for step in routes.find(run, held, 6).steps] == ["anchor"]


def test_blobs_of_a_commit_under_way_stay(run: Run) -> None:
    versions = anchored_series(run, 4, 3)
    limit(run, keep_versions=1)
    coming = build(run, 4, versions[-1])
    upload(run, coming)
    collect(run)
    assert services.commit_manifest(run, coming.envelope, None, actor="test")[1]


def test_what_nobody_commits_goes_after_a_day(run: Run) -> None:
    series(run, 2)
    stray = services.add_blob(run, b"never committed")
    assert retention.preview(run).nothing
    # Blobs never change, so that the test makes an old one instead of ageing this one.
    with retention.removing():
        stray.delete()
    Blob.objects.create(run=run, sha256=stray.sha256, size=15, created_at=Now() - timedelta(days=2))
    assert collect(run).blobs == {stray.sha256: 15}
    assert states(run) == "RR"


def test_killed_between_rows_and_bytes_the_next_round_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    anchored_series(run, 4, 3)
    limit(run, keep_versions=1)

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(blobs.store()), "remove", kill)
        collect(run)
    left = Tombstone.objects.filter(run=run, cleared_at=None)
    assert left.exists()
    names = list(left.values_list("sha256", flat=True))
    assert any(blobs.store().size(run.pk, name) is not None for name in names)
    collect(run)
    assert all(blobs.store().size(run.pk, name) is None for name in names)
    require_whole(run)


def test_bytes_that_come_back_meanwhile_are_left_alone(run: Run) -> None:
    back = services.add_blob(run, b"again")
    Tombstone.objects.create(run=run, sha256=back.sha256, size=back.size)
    Tombstone.objects.create(run=run, sha256="ab" * 32, size=3)
    Upload.objects.create(run=run, sha256="ab" * 32, size=3)
    assert retention.clear(run, lambda _: None) == 0
    assert blobs.store().size(run.pk, back.sha256) == 5


def test_a_long_way_to_the_oldest_asks_for_an_anchor(run: Run) -> None:
    anchored_series(run, 14)
    limit(run, keep_versions=3)
    shown = retention.preview(run)
    assert (shown.nothing, shown.anchor) == (True, 11)
    limit(run, keep_versions=13)
    assert retention.preview(run).anchor is None


def test_failed_versions_lose_their_patches_and_keep_their_rows(run: Run) -> None:
    first = ready(run, 0)
    bad = commit(run, 1, first)
    services.mark_failed(bad, "A digest is wrong.")
    collect(run)
    assert states(run) == "Rx"
    assert not Patch.objects.filter(to_version=bad).exists()


def test_the_number_of_queries_does_not_grow(run: Run, django_assert_max_num_queries: Any) -> None:
    anchored_series(run, 3, 2)
    limit(run, keep_versions=1)
    with django_assert_max_num_queries(22):
        retention.preview(run)
    for number in range(3, 9):
        ready(run, number, Version.objects.get(run=run, number=number - 1))
    with django_assert_max_num_queries(22):
        retention.preview(run)
    assert Channel.objects.get(run=run).version is not None
    assert Anchor.objects.filter(version__run=run).count() == 2


@st.composite
def lineages(draw: st.DrawFn) -> tuple[list[keeping.Node], dict[int, str], list[tuple[int, int]]]:
    count = draw(st.integers(1, 24))
    nodes = []
    for key in range(count):
        parent = None if key == 0 else draw(st.integers(max(0, key - 3), key - 1))
        nodes.append(keeping.Node(key, key, parent, key > 0 and draw(st.integers(0, 9)) > 0, draw(st.booleans())))
    keys = st.integers(0, count - 1)
    wanted = dict.fromkeys(draw(st.lists(keys, max_size=5)), "wanted")
    return nodes, wanted, draw(st.lists(st.tuples(keys, keys), max_size=3))


def reachable(nodes: list[keeping.Node], left: set[int], key: int) -> bool:
    by_key = {node.key: node for node in nodes if node.key in left}
    node = by_key.get(key)
    while node is not None:
        if node.anchored:
            return True
        node = by_key.get(node.parent) if node.stepped and node.parent is not None else None
    return False


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lineages())
def test_a12_keeping_breaks_no_route(lineage: Any) -> None:
    nodes, wanted, islands = lineage
    kept = keeping.keep(nodes, wanted, islands)
    left, everything = set(kept.reasons), {node.key for node in nodes}
    for key in wanted:
        assert key in left
        assert reachable(nodes, left, key) == reachable(nodes, everything, key) == (key not in kept.unreachable)
    by_key = {node.key: node for node in nodes}
    for held, target in islands:
        chain, node = [], by_key.get(target)
        while node is not None and node.key != held:
            chain.append(node.key)
            node = by_key.get(node.parent) if node.stepped and node.parent is not None else None
        if node is not None:
            assert {held, *chain} <= left
