"""`announce: committed`: islands hear of a version at its commit; one that fails its validation is taken back."""

from __future__ import annotations

import pytest

from controlplane.audit.models import Entry
from controlplane.fleet import services as fleet
from controlplane.fleet.models import Island
from controlplane.registry import routes, services
from controlplane.registry.announcing import servable
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Channel, Run, Version
from tests.controlplane.making import commit, make_ready, ready, series

pytestmark = pytest.mark.django_db


@pytest.fixture
def eager(run: Run) -> Run:
    Run.objects.filter(pk=run.pk).update(announce=Run.Announce.COMMITTED)
    run.refresh_from_db()
    return run


def latest(run: Run) -> tuple[int | None, int]:
    channel = Channel.objects.select_related("version").get(run=run, name=Channel.LATEST)
    return None if channel.version is None else channel.version.number, channel.serial


def test_the_head_moves_at_the_commit_and_once(eager: Run) -> None:
    first = ready(eager, 0)
    second = commit(eager, 1, first)
    assert second.state == Version.State.COMMITTED
    assert latest(eager) == (1, 2)
    assert routes.find(eager, first.state_digest, 1).target == 1
    make_ready(second)
    assert latest(eager) == (1, 2)


def test_by_default_it_moves_after_the_validation(run: Run) -> None:
    first = ready(run, 0)
    second = commit(run, 1, first)
    assert latest(run) == (0, 1)
    assert list(servable(run)) == [first]
    with pytest.raises(Refusal):
        routes.find(run, first.state_digest, 1)
    make_ready(second)
    assert latest(run) == (1, 2)


def test_the_first_version_waits_for_its_validation(eager: Run) -> None:
    first = commit(eager, 0)
    assert latest(eager) == (None, 0)
    make_ready(first)
    assert latest(eager) == (0, 1)


def test_what_fails_is_taken_back_with_everything_on_top_of_it(eager: Run) -> None:
    versions = series(eager, 2)
    third = commit(eager, 2, versions[1])
    commit(eager, 3, third)
    assert latest(eager)[0] == 3
    serial = latest(eager)[1]
    services.mark_failed(third, "A digest is wrong.")
    assert latest(eager) == (1, serial + 1)
    entry = Entry.objects.filter(action="channel.edit").order_by("pk").last()
    assert entry is not None and entry.after == {"version": 1, "reason": "The version failed its validation."}


def test_an_island_that_followed_counts_as_there_and_then_as_ahead(eager: Run, island: Island) -> None:
    first = ready(eager, 0)
    second = commit(eager, 1, first)
    report = fleet.report_sync(
        island, from_version=0, version=1, digest=second.state_digest, outcome="applied", verified=True
    )
    assert report.accepted
    services.mark_failed(second, "A digest is wrong.")
    from controlplane.fleet import selectors as fleets

    fleet.heartbeat(island, version=1, digest=second.state_digest, epoch=0, phase="idle", reason="")
    assert fleets.row(fleets.island(eager.project, island.pk)).sync == "ahead"
    # Its bytes are no version's: it starts from the anchor again, without anybody's help.
    with pytest.raises(Refusal, match="digest"):
        routes.find(eager, second.state_digest, 0)
    assert [step["kind"] for step in routes.find(eager, "", 0).steps] == ["anchor"]


def test_a_protected_channel_stays(eager: Run) -> None:
    first = ready(eager, 0)
    Channel.objects.filter(run=eager).update(protected=True)
    commit(eager, 1, first)
    assert latest(eager) == (0, 1)
