"""The audit log: every change with before and after, filters, and exports."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, transaction
from django.db.models import ProtectedError

from controlplane.accounts import services as accounts
from controlplane.audit import selectors, services
from controlplane.audit.models import Entry
from controlplane.audit.selectors import Filter
from controlplane.registry.models import Project, Run
from controlplane.registry.retention import removing
from tests.controlplane.conftest import enrol


@pytest.fixture
def log(project: Project, foreign: Project) -> list[Entry]:
    made = [
        services.record(project, "ada", "island.drain", "island porto", before={"drain_until": None}, after={"a": 1}),
        services.record(project, "bob", "island.pin", "island oslo", after={"version": 3}),
        services.record(project, "ada", "token.create", "token =cmd|' /C calc'!A0", after={"role": "viewer"}),
    ]
    services.record(foreign, "eve", "island.drain", "island elsewhere")
    for entry in made:
        entry.refresh_from_db()
    return made


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(), [2, 1, 0]),
        (Filter(actor="ada"), [2, 0]),
        (Filter(action="island"), [1, 0]),
        (Filter(action="island.pin"), [1]),
        (Filter(action="isl"), []),
        (Filter(target="OSLO"), [1]),
        (Filter(actor="ada", action="token"), [2]),
        (Filter(request_id="unknown"), []),
    ],
)
def test_filters(project: Project, log: list[Entry], chosen: Filter, expected: list[int]) -> None:
    mine = {entry.pk for entry in log}  # making the project left an entry too
    found = [entry.pk for entry in selectors.entries(project, chosen) if entry.pk in mine]
    assert found == [log[index].pk for index in expected]


def test_times_bound_the_log(project: Project, log: list[Entry]) -> None:
    old = Entry.objects.create(project=project, actor="ada", action="a.b", target="x", at=log[1].at - timedelta(days=1))
    since = log[1].at - timedelta(hours=1)
    assert [entry.pk for entry in selectors.entries(project, Filter(since=since))][:3] == [e.pk for e in log[::-1]]
    assert selectors.entries(project, Filter(until=since)).get().pk == old.pk
    assert {"ada", "bob"} <= set(selectors.actors(project)) and "eve" not in selectors.actors(project)
    assert {"a.b", "island.drain", "island.pin", "token.create"} <= set(selectors.actions(project))


def test_entries_are_added_and_nothing_else(project: Project, log: list[Entry]) -> None:
    rows = Entry.objects.filter(project=project)
    for attempt in (
        lambda: rows.update(actor="nobody"),
        lambda: rows.update(at=log[0].at),
        rows.delete,
        lambda: rows._raw_delete("default"),
    ):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            attempt()
        with removing(), pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            attempt()
    with pytest.raises(ProtectedError), transaction.atomic():
        project.delete()
    assert [entry.actor for entry in selectors.entries(project)][:3] == ["ada", "bob", "ada"]


def test_choices_cost_no_more_in_an_old_log(
    project: Project, log: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "RECENT", 2)
    assert selectors.actors(project) == ["ada", "bob"]
    assert selectors.actions(project) == ["island.pin", "token.create"]
    monkeypatch.setattr(selectors, "CHOICES", 1)
    assert selectors.actors(project) == ["ada"]


def body(answer: Any) -> str:
    return b"".join(answer.streaming_content).decode()


def test_exports_are_streamed_and_harmless(project: Project, log: list[Entry], token: Any) -> None:
    api = token("viewer")
    answer = api.get("audit/export?as=csv&action=token")
    assert answer["Content-Type"].startswith("text/csv") and "attachment" in answer["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(body(answer))))
    assert [row["actor"] for row in rows][-1] == "ada"
    assert {"=", "+", "-", "@"}.isdisjoint(cell[:1] for row in rows for cell in row.values())
    lines = [json.loads(line) for line in body(api.get("audit/export?as=jsonl&actor=bob")).splitlines()]
    assert [(line["target"], line["after"]) for line in lines] == [("island oslo", {"version": 3})]
    assert api.get("audit/export?as=xlsx").status_code == 400
    assert "elsewhere" not in body(api.get("audit/export?as=jsonl"))


def test_an_export_reads_a_few_rows_at_a_time(project: Project, django_assert_num_queries: Any) -> None:
    Entry.objects.bulk_create(
        Entry(project=project, actor="ada", action="a.b", target=f"t{index}", request_id="") for index in range(1100)
    )
    with django_assert_num_queries(4):
        sizes = [len(batch) for batch in selectors.batches(project, Filter(actor="ada"))]
    assert sizes == [500, 500, 100]


def test_the_log_over_http(project: Project, log: list[Entry], token: Any) -> None:
    api = token("viewer")
    page = api.get("audit?actor=ada&limit=1").json()
    assert page["results"][0]["action"] == "token.create"
    after = api.get(f"audit?actor=ada&limit=1&cursor={page['next']}").json()
    assert after["results"][0]["before"] == {"drain_until": None} and after["next"] is None
    for query in ("since=yesterday", "since=2026-11-30T12:00:00", "actor=" + "x" * 300):
        assert api.get(f"audit?{query}").status_code == 400, query


def test_every_change_names_its_request(project: Project, run: Run, token: Any) -> None:
    operator = token("operator")
    island, _ = enrol(run)
    number = "change-0001"
    operator.client.post(
        f"{operator.base}islands/{island.pk}/drain",
        "{}",
        content_type="application/json",
        headers=operator.headers | {"X-Request-ID": number},
    )
    found = operator.get(f"audit?request_id={number}").json()["results"]
    assert [(entry["action"], entry["actor"]) for entry in found] == [("island.drain", "operator:operator")]


def test_no_entry_holds_a_secret(project: Project, run: Run) -> None:
    _, token = accounts.create_token(project, "viewer", "board", actor="ada")
    _, credential = enrol(run)
    text = " ".join(f"{entry.before} {entry.after} {entry.target}" for entry in Entry.objects.all())
    for secret in (token, credential):
        assert secret.split("_", 2)[2] not in text
