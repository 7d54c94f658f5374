"""What operators set over the API: settings and channels, each edit on the revision that was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.audit.models import Entry
from controlplane.jobs.models import Job
from controlplane.registry.models import Anchor, Channel, Patch, Run, Version
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from tests.controlplane.api.test_calls import problem
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import commit, make_ready, ready, series

pytestmark = pytest.mark.django_db

RUN, STABLE, LATEST = "runs/minilm", "runs/minilm/channels/stable", "runs/minilm/channels/latest"


def change(api: Api, method: str, path: str, body: Any, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    call = getattr(api.client, method)
    return call(api.base + path, body, content_type="application/json", headers=api.headers | named)


def head_of(run: Run, name: str = "latest") -> Head:
    envelope = Channel.objects.get(run=run, name=name).head_envelope
    return Head.from_bytes(Envelope.from_dict(envelope).open(HEAD_TYPE))


@pytest.fixture
def operator(token: Callable[..., Api]) -> Api:
    return token("operator")


# Settings


def test_settings_change_on_the_revision_that_was_seen(run: Run, operator: Api) -> None:
    seen = operator.get(RUN)
    assert seen.json()["settings"] == {
        "announce": "validated", "encode_for": "size", "keep_versions": None, "keep_days": None, "anchor_every": None,
        "merge_up_to": 256, "staleness_versions": None, "staleness_seconds": None,
    }  # fmt: skip
    changed = change(operator, "patch", RUN, {"keep_versions": 50, "staleness_seconds": 600}, If_Match=seen["ETag"])
    assert changed.status_code == 200 and changed["ETag"] != seen["ETag"]
    assert changed.json()["settings"]["keep_versions"] == 50
    late = change(operator, "patch", RUN, {"keep_versions": 10}, If_Match=seen["ETag"])
    problem(late, 412, "precondition_failed")
    assert operator.get(RUN).json()["settings"]["keep_versions"] == 50
    lifted = change(operator, "patch", RUN, {"keep_versions": None}, If_Match="*")
    assert lifted.json()["settings"]["keep_versions"] is None
    entry = Entry.objects.filter(action="run.edit").order_by("pk")[0]
    assert (entry.before, entry.after) == (
        {"keep_versions": None, "staleness_seconds": None},
        {"keep_versions": 50, "staleness_seconds": 600},
    )


def test_an_edit_that_changes_nothing_keeps_the_revision(run: Run, operator: Api) -> None:
    seen = operator.get(RUN)["ETag"]
    assert change(operator, "patch", RUN, {}, If_Match=seen)["ETag"] == seen
    assert change(operator, "patch", RUN, {"keep_days": None}, If_Match=seen)["ETag"] == seen
    assert not Entry.objects.filter(action="run.edit").exists()


def test_a_new_version_does_not_void_what_was_seen(run: Run, operator: Api) -> None:
    seen = operator.get(RUN)["ETag"]
    series(run, 1)
    assert change(operator, "patch", RUN, {"anchor_every": 16}, If_Match=seen).status_code == 200


def test_what_new_settings_ask_for_at_the_newest_version_is_queued(run: Run, operator: Api) -> None:
    def queued() -> set[tuple[str, Any, Any]]:
        found = Job.objects.filter(kind__in=("merge", "anchor")).values_list("kind", "params")
        return {(kind, params.get("from"), params.get("to", params.get("version"))) for kind, params in found}

    Run.objects.filter(pk=run.pk).update(merge_up_to=0)
    change(operator, "patch", RUN, {"merge_up_to": 1}, If_Match=operator.get(RUN)["ETag"])  # nothing is there yet
    series(run, 9)
    assert queued() == set()
    change(operator, "patch", RUN, {"keep_days": 9}, If_Match=operator.get(RUN)["ETag"])
    assert queued() == set(), "other settings build nothing"
    change(operator, "patch", RUN, {"merge_up_to": 4, "anchor_every": 3}, If_Match=operator.get(RUN)["ETag"])
    due = {("merge", 6, 8), ("merge", 4, 8), ("anchor", None, 6)}
    assert queued() == due
    Job.objects.update(state="succeeded", finished_at=Now())
    versions = {version.number: version for version in Version.objects.all()}
    for origin in (6, 4):
        facts = {"from_version": versions[origin], "to_version": versions[8], "kind": "merged", "bytes": 1}
        Patch.objects.create(run=run, **facts)
    Anchor.objects.create(version=versions[6], files=[], bytes=1)
    change(operator, "patch", RUN, {"merge_up_to": 8, "anchor_every": 6}, If_Match=operator.get(RUN)["ETag"])
    assert queued() == due | {("merge", 0, 8)}, "what is there is not built again"


@pytest.mark.parametrize("tag", ['"r0"', "r1", 'W/"r1"', '"r1", "r2"', '"x"', '"r99999999999999999999"'])
def test_other_tags_are_412(run: Run, operator: Api, tag: str) -> None:
    problem(change(operator, "patch", RUN, {"keep_days": 1}, If_Match=tag), 412, "precondition_failed")


@pytest.mark.parametrize(
    "body",
    [{"keep_versions": 0}, {"keep_days": -1}, {"anchor_every": "5"}, {"keep_versions": 1 << 31}, {"name": "other"},
     {"announce": "never"}, {"keepversions": 4}, [], "x"],
)  # fmt: skip
def test_settings_that_can_not_be(run: Run, operator: Api, body: Any) -> None:
    problem(change(operator, "patch", RUN, body, If_Match="*"), 400, "invalid_request")


def test_an_edit_says_what_it_saw(run: Run, operator: Api) -> None:
    problem(change(operator, "patch", RUN, {"keep_days": 1}), 428, "precondition_required")


@pytest.mark.parametrize("role", ["publisher", "viewer", "island"])
def test_only_operators_steer(run: Run, token: Callable[..., Api], role: str) -> None:
    api = Api("harbour", enrol(run)[1]) if role == "island" else token(role)
    problem(change(api, "patch", RUN, {"keep_days": 1}, If_Match="*"), 403, "forbidden")
    problem(change(api, "put", LATEST, {"protected": True}, If_Match="*"), 403, "forbidden")


# Channels


def test_a_channel_is_made_once_and_moves_on_what_was_seen(run: Run, operator: Api) -> None:
    series(run, 3)
    missing = problem(change(operator, "put", STABLE, {"version": 0}, If_Match="*"), 404, "not_found")
    assert "If-None-Match" in missing["detail"]
    made = change(operator, "put", STABLE, {"version": 1}, If_None_Match="*")
    assert made.status_code == 201
    assert (made.json()["version"], made.json()["serial"], made.json()["protected"]) == (1, 1, False)
    problem(change(operator, "put", STABLE, {"version": 2}, If_None_Match="*"), 412, "precondition_failed")
    moved = change(operator, "put", STABLE, {"version": 2}, If_Match=made["ETag"])
    assert (moved.json()["version"], moved.json()["serial"]) == (2, 2)
    problem(change(operator, "put", STABLE, {"version": 1, "reason": "x"}, If_Match=made["ETag"]), 412,
            "precondition_failed")  # fmt: skip
    assert head_of(run, "stable").version == 2
    assert [row["channel"] for row in operator.get("runs/minilm/channels").json()["results"]] == ["latest", "stable"]
    problem(change(operator, "put", STABLE, {"version": 0}), 428, "precondition_required")


def test_a_rollback_is_a_higher_serial_with_a_reason(run: Run, operator: Api) -> None:
    series(run, 3)
    seen = operator.get(LATEST)
    problem(change(operator, "put", LATEST, {"version": 1}, If_Match=seen["ETag"]), 422, "reason_required")
    body = {"version": 1, "reason": "Version 2 babbles.", "protected": True}
    back = change(operator, "put", LATEST, body, If_Match=seen["ETag"]).json()
    assert (back["version"], back["serial"], back["protected"]) == (1, 4, True)
    head = head_of(run)
    assert (head.version, head.serial) == (1, 4)
    entry = Entry.objects.get(action="channel.edit")
    assert entry.after is not None and entry.after["reason"] == "Version 2 babbles."
    assert entry.before == {"version": 2, "serial": 3, "protected": False}
    ready(run, 3, Version.objects.get(run=run, number=2))
    assert head_of(run).version == 1, "a protected channel moves by hand alone"


def test_what_an_edit_of_a_channel_leaves_unsaid_stays(run: Run, operator: Api) -> None:
    series(run, 3)
    change(operator, "put", STABLE, {"version": 1, "protected": True}, If_None_Match="*")
    moved = change(operator, "put", STABLE, {"version": 2}, If_Match="*").json()
    assert (moved["version"], moved["protected"]) == (2, True)
    freed = change(operator, "put", STABLE, {"protected": False}, If_Match="*").json()
    assert (freed["version"], freed["protected"]) == (2, False)
    assert not change(operator, "put", STABLE, {"version": 2}, If_Match="*").json()["protected"]
    problem(change(operator, "put", STABLE, {"protected": None}, If_Match="*"), 400, "invalid_request")


def test_a_channel_points_at_ready_versions_of_its_run(run: Run, other_run: Run, operator: Api) -> None:
    versions = series(run, 1)
    commit(run, 1, versions[0])
    problem(change(operator, "put", LATEST, {"version": 1}, If_Match="*"), 409, "not_ready")
    problem(change(operator, "put", LATEST, {"version": 7}, If_Match="*"), 404, "not_found")
    problem(change(operator, "put", STABLE, {"version": 1}, If_None_Match="*"), 409, "not_ready")
    assert not Channel.objects.filter(run=run, name="stable").exists(), "nothing is left of a refusal"
    ready(other_run, 0)
    problem(change(operator, "put", "runs/qwen/channels/latest", {"version": 1}, If_Match="*"), 404, "not_found")


@pytest.mark.parametrize("name", ["island-porto", "x" * 41])
def test_reserved_names(run: Run, operator: Api, name: str) -> None:
    answer = change(operator, "put", f"runs/minilm/channels/{name}", {}, If_None_Match="*")
    problem(answer, 422, "name_reserved")


def test_the_next_version_voids_what_was_seen_of_latest(run: Run, operator: Api) -> None:
    versions = series(run, 1)
    seen = operator.get(LATEST)["ETag"]
    make_ready(commit(run, 1, versions[0]))
    problem(change(operator, "put", LATEST, {"protected": True}, If_Match=seen), 412, "precondition_failed")


def test_a_renewed_head_does_not_void_what_was_seen(run: Run, operator: Api) -> None:
    from django.db.models.functions import Now

    from controlplane.registry import heads

    series(run, 1)
    seen = operator.get(LATEST)["ETag"]
    Channel.objects.filter(run=run).update(expires_at=Now())
    assert heads.renew_heads() == 1
    assert change(operator, "put", LATEST, {"protected": True}, If_Match=seen).status_code == 200


def test_epochs_are_listed_and_checked(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    series(run, 2)
    made = api.post("runs/minilm/epochs", {"from_version": 1, "reason": "Resumed."})
    assert made.status_code == 201 and made.json()["from_version"] == 1
    fresh = api.post("runs/minilm/epochs", {"from_version": None, "reason": "From fresh bytes."})
    assert fresh.json()["from_version"] is None
    listed = api.get("runs/minilm/epochs").json()["results"]
    assert [row["number"] for row in listed] == [2, 1, 0]
    problem(api.post("runs/minilm/epochs", {"from_version": 9, "reason": "x"}), 409, "parent_not_ready")
    problem(api.post("runs/minilm/epochs", {"from_version": 1, "reason": ""}), 400, "invalid_request")
    late = commit(run, 2, None, epoch=2)
    problem(api.post("runs/minilm/epochs", {"from_version": late.number, "reason": "x"}), 409, "parent_not_ready")
