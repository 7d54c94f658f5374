"""Islands that were away: how they come back, along which routes, and what they refuse on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.trainer import Publisher
from tests.island.fleet import held_state, island
from tests.together.test_real_server import Harbour, harbour
from tests.waiting import eventually

__all__ = ["harbour"]  # a fixture

Arrays = dict[str, np.ndarray[Any, Any]]


def matrix(seed: int = 0) -> Arrays:
    """A small matrix."""
    return {"w": np.random.default_rng(seed).integers(0, 1 << 16, (512, 256), dtype=np.uint16)}


def publish(trainer: Publisher, arrays: Arrays, count: int) -> None:
    """So many versions, each with a hundredth of the elements changed."""
    random = np.random.default_rng(count)
    for _ in range(count):
        flat = arrays["w"].reshape(-1)
        flat[random.choice(flat.size, flat.size // 100, replace=False)] ^= 1
        trainer.publish(arrays)


def state_of(arrays: Arrays) -> str:
    return measure(ArraySource(arrays)).digest


def last_route(name: str) -> list[str]:
    from controlplane.fleet.models import SyncReport

    report = SyncReport.objects.filter(island__name=name, accepted=True).latest("pk")
    return list(report.route)


@pytest.fixture
def run(harbour: Harbour) -> Any:
    from controlplane.registry.models import Run

    Run.objects.update(merge_up_to=0)
    return Run.objects.get()


def test_a16_an_island_that_was_away_waits_for_one_patch(harbour: Harbour, run: Any, tmp_path: Path) -> None:
    """A16: eleven versions behind a slow link. The merge is built while it waits, and it takes that one patch."""
    from controlplane.fleet.models import Island
    from controlplane.jobs.models import Job

    arrays, store = matrix(), tmp_path / "store"
    with harbour.publisher() as trainer:
        publish(trainer, arrays, 1)
        with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as first:
            first.join()
        publish(trainer, arrays, 11)
    Island.objects.update(link_bytes_per_second=500)  # as it was measured before it left
    with island(harbour.server, store, token=None, once=True) as again:
        again.join()
    assert held_state(store) == state_of(arrays)
    assert last_route("skerry") == ["patch 0-11"]
    (job,) = Job.objects.filter(kind="merge")
    assert job.result and job.result["kept"] and job.result["bytes"] < job.result["replaces"]


def test_a16_with_aligned_spans_alone_any_lag_is_few_patches(harbour: Harbour, run: Any, tmp_path: Path) -> None:
    from controlplane.jobs.models import Job

    type(run).objects.update(merge_up_to=8)
    arrays, store = matrix(), tmp_path / "store"
    with harbour.publisher() as trainer:
        publish(trainer, arrays, 2)
        with island(harbour.server, store, token=harbour.enrol("holm"), once=True) as first:
            first.join()
        publish(trainer, arrays, 11)
    eventually(lambda: not Job.objects.filter(state__in=Job.UNFINISHED).exists())
    from controlplane.fleet.models import Island

    Island.objects.update(link_bytes_per_second=100_000)
    with island(harbour.server, store, token=None, once=True) as again:
        again.join()
    assert held_state(store) == state_of(arrays)
    assert last_route("holm") == ["patch 1-2", "patch 2-4", "patch 4-8", "patch 8-12"]


def test_a06_a_patch_over_the_wrong_base_is_refused_before_anything_is_written(
    harbour: Harbour, run: Any, tmp_path: Path
) -> None:
    """A06: a merged patch whose bytes skip a version. The island keeps what it holds, says so, and gets there by
    another way.
    """
    from controlplane.fleet.models import SyncReport
    from controlplane.registry.models import Patch, PatchPart, Version

    arrays, store = matrix(), tmp_path / "store"
    with harbour.publisher() as trainer:
        publish(trainer, arrays, 2)
        before = state_of(arrays)
        with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as first:
            first.join()
        publish(trainer, arrays, 2)
    versions = {version.number: version for version in Version.objects.all()}
    honest = Patch.objects.get(to_version=versions[3])
    lying = Patch.objects.create(
        run=run, from_version=versions[1], to_version=versions[3], kind="merged", bytes=1, codecs=honest.codecs
    )
    PatchPart.objects.create(patch=lying, index=0, blob=honest.parts.get().blob)
    assert held_state(store) == before
    with island(harbour.server, store, token=None, poll_seconds=1):
        eventually(lambda: harbour.at("skerry") == 3)
    assert held_state(store) == state_of(arrays)
    refused = SyncReport.objects.filter(outcome="failed").first()
    assert refused is not None and "starts from" in refused.error, refused
    assert last_route("skerry") == ["patch 1-2", "patch 2-3"], "the publisher's own alone"


def test_a48_an_island_whose_base_was_collected_comes_back_by_an_anchor(
    harbour: Harbour, run: Any, tmp_path: Path
) -> None:
    """A48: nothing leads on from what it holds, and nobody has to do anything."""
    from datetime import timedelta

    from django.db.models.functions import Now

    from controlplane.fleet.models import Island
    from controlplane.jobs import triggers
    from controlplane.registry.models import Version, VersionLease

    arrays, store = matrix(), tmp_path / "store"
    with harbour.publisher() as trainer:
        publish(trainer, arrays, 1)
        with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as first:
            first.join()
        publish(trainer, arrays, 4)
        assert harbour.finished("anchor", run="voyage", version=3)["state"] == "succeeded"
        type(run).objects.update(keep_versions=1)
        Island.objects.update(last_seen_at=Now() - timedelta(days=9), verified_version=None)
        VersionLease.objects.update(expires_at=Now() - timedelta(days=8))
        run.refresh_from_db()
        job = triggers.collect(run, actor="test")[0]
        eventually(lambda: job.refresh_from_db() or job.finished)
        assert job.state == "succeeded", job.error
        assert not Version.objects.filter(number__lt=3, state="ready").exists()
        with island(harbour.server, store, token=None, once=True) as again:
            again.join()
        assert held_state(store) == state_of(arrays)
        assert last_route("skerry")[0] == "anchor 3"


def test_a_rollback_is_walked_back_by_one_patch(harbour: Harbour, run: Any, tmp_path: Path) -> None:
    from controlplane.jobs.models import Job
    from controlplane.registry import steering
    from controlplane.registry.models import Channel

    arrays, store = matrix(), tmp_path / "store"
    with harbour.publisher() as trainer:
        publish(trainer, arrays, 3)
        before = state_of(arrays)
        publish(trainer, arrays, 3)
    with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as first:
        first.join()
    channel = Channel.objects.get(run=run, name="latest")
    steering.edit_channel(channel, version=2, protected=True, reason="The reward fell.", seen=None, actor="ops")
    job = eventually(lambda: Job.objects.filter(kind="merge", state="succeeded").first())
    assert job.params["from"] == 5 and job.params["to"] == 2
    with island(harbour.server, store, token=None, once=True) as again:
        again.join()
    assert held_state(store) == before
    assert last_route("skerry") == ["patch 5-2"]
