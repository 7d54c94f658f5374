"""Anchors by reference: registered by operators, offered to islands that can read them, never what workers count on."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.audit.models import Entry
from controlplane.registry import referencing, routes
from controlplane.registry.errors import Missing, Refusal, Unacceptable
from controlplane.registry.models import Anchor, Run
from tests.controlplane.making import commit, series

pytestmark = pytest.mark.django_db
URI = "file:///shared/models/base"


def files(size: int = 4096) -> list[dict[str, Any]]:
    return [{"path": "model.safetensors", "sha256": "ab" * 32, "size": size}]


def register(run: Run, number: int = 2, uri: str = URI, listed: Any = None) -> bool:
    return referencing.register(run, number, uri, files() if listed is None else listed, actor="operator")[1]


def test_islands_that_can_read_elsewhere_start_from_it_and_others_do_not(run: Run) -> None:
    series(run, 4)
    assert register(run)
    near = routes.find(run, "", 3, scope=routes.ELSEWHERE)
    assert [(step["kind"], step.get("uri")) for step in near.steps] == [("anchor", URI), ("patch", None)]
    assert near.steps[0]["files"] == files()
    far = routes.find(run, "", 3)
    assert [step.get("version", step.get("to")) for step in far.steps] == [0, 1, 2, 3], "blobs of the run alone"
    assert Entry.objects.filter(action="version.anchor").count() == 1


def test_the_same_again_changes_nothing_and_another_one_is_refused(run: Run) -> None:
    series(run, 3)
    assert register(run) and not register(run)
    for change in ({"uri": "https://models.example.com/base"}, {"listed": files(5000)}, {"number": 0}):
        with pytest.raises(Refusal) as caught:
            register(run, **change)  # type: ignore[arg-type]
        assert caught.value.code == "anchor_exists"
    assert Anchor.objects.count() == 2


@pytest.mark.parametrize(
    "uri",
    ["", "/shared/base", "ftp://h/x", "file://host/x", "file:relative", "https:///x", "https://user:pw@h/x",
     "https://h/x?token=1", "https://h/x#y", "file:///a/../etc", "https://h/a b", "https://[bad/x"],
)  # fmt: skip
def test_addresses_that_are_none(run: Run, uri: str) -> None:
    series(run, 3)
    with pytest.raises(Unacceptable) as caught:
        register(run, uri=uri)
    assert caught.value.code == "anchor_invalid"


@pytest.mark.parametrize(
    "listed",
    [[], files(10), [*files(), *files()], [{"path": "../x.safetensors", "sha256": "ab" * 32, "size": 4096}],
     [*files(), {"path": "extra.json", "sha256": "cd" * 32, "size": 1}], [{"path": "model.safetensors"}]],
)  # fmt: skip
def test_files_that_can_not_be_the_version(run: Run, listed: Any) -> None:
    series(run, 3)
    with pytest.raises(Unacceptable) as caught:
        register(run, listed=listed)
    assert caught.value.code == "anchor_invalid"
    assert Anchor.objects.count() == 1


def test_versions_that_are_not_ready_or_not_there(run: Run) -> None:
    series(run, 2)
    with pytest.raises(Missing):
        register(run, 7)
    commit(run, 2, run.versions.get(number=1))
    with pytest.raises(Refusal) as caught:
        register(run, 2)
    assert caught.value.code == "not_ready"
