"""Lists: pages that follow one another, filters, and as many queries for many rows as for few.

The numbers of queries stand in tests/controlplane/query_counts.json; `MAILBOAT_UPDATE_QUERY_COUNTS=1` writes them anew.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.audit import services as audit
from controlplane.registry import services as registry
from controlplane.registry.models import Blob, Project, Run
from tests import factories as make
from tests.controlplane.api.test_calls import problem
from tests.controlplane.conftest import Api
from tests.controlplane.making import series

pytestmark = pytest.mark.django_db

BASELINE = Path(__file__).parent.parent / "query_counts.json"
UPDATE = "MAILBOAT_UPDATE_QUERY_COUNTS"
FEW, MANY = 2, 9


def fill(project: Project, run: Run, rows: int) -> None:
    """`rows` more of everything that is listed."""
    line = list(run.versions.order_by("number"))
    for _ in range(rows):
        number = len(line)
        line.append(make.mk_version(run, number, parent=line[-1] if line else None))
        for patch in line[-1].patches_in.all():
            part = Blob.objects.create(run=run, sha256=make.digest_of(f"part {number}"), size=1_000_000)
            patch.parts.create(index=0, blob=part)
        another = registry.create_run(project, f"run-{number}", actor="test")
        make.mk_version(another, 0)
        registry.begin_epoch(run, None, "More.", actor="test")
        island = make.mk_island(run, f"island{number}", at=line[number - number % 2])
        make.mk_sync(island, line[number])
        make.mk_sync(run.islands.order_by("enrolled_at")[0], line[number])
        make.mk_job(project, "replay", run=run)
        job = make.mk_job(project, "verify", run=run, state="succeeded")
        make.mk_event(job, "Done.")
        make.mk_event(project.jobs.order_by("queued_at")[0], "More.")
        run.channels.create(name=f"channel-{number}")
        audit.record(project, "test", "test.row", f"row {number}")
        make.mk_enrolment(run, f"newcomer{number}")
        make.mk_member(project)
    make.announce(line[-1])


def lists(project: Project, run: Run) -> dict[str, str]:
    """Every call whose answer has rows, by a name of its own."""
    island = run.islands.order_by("enrolled_at")[0]
    job = project.jobs.order_by("queued_at")[0]
    return {
        "runs": "runs",
        "versions": f"runs/{run.name}/versions",
        "epochs": f"runs/{run.name}/epochs",
        "channels": f"runs/{run.name}/channels",
        "plan": f"runs/{run.name}/plan",
        "islands": "islands",
        "fleet": "fleet",
        "syncs": f"islands/{island.pk}/syncs",
        "jobs": "jobs",
        "job events": f"jobs/{job.pk}/events",
        "tokens": "tokens",
        "members": "members",
        "enrolment tokens": "enrolment-tokens",
        "audit": "audit",
        "queues": "queues",
        "workers": "workers",
    }


def queries_of(api: Any, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert api.get(path).status_code == 200, path
    return len(captured)


@pytest.fixture
def admin(person: Callable[[str], Any]) -> Any:
    client = person("owner")

    class Calls:
        def get(self, path: str) -> Any:
            return client.get("/api/v1/projects/harbour/" + path)

    return Calls()


def test_queries_do_not_grow_with_rows(project: Project, run: Run, admin: Any) -> None:
    fill(project, run, FEW)
    known = lists(project, run)
    few = {name: queries_of(admin, path) for name, path in known.items()}
    fill(project, run, MANY)
    many = {name: queries_of(admin, path) for name, path in known.items()}
    assert many == few
    if os.environ.get(UPDATE):
        BASELINE.write_text(json.dumps(few, indent=2, sort_keys=True) + "\n")
    expected = json.loads(BASELINE.read_text())
    assert few == expected, f"say why, and run once with {UPDATE}=1"


def pages(api: Any, path: str, limit: int) -> list[Any]:
    """Every row of a list, page by page."""
    found: list[Any] = []
    joint = "&" if "?" in path else "?"
    answer = api.get(f"{path}{joint}limit={limit}").json()
    while True:
        assert len(answer["results"]) <= limit
        found += answer["results"]
        if answer["next"] is None:
            return found
        answer = api.get(f"{path}{joint}limit={limit}&cursor={answer['next']}").json()


def named(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what passes with time."""
    return {name: value for name, value in row.items() if name not in {"skew", "health"}}


PAGED = ["runs", "versions", "epochs", "channels", "islands", "syncs", "jobs", "audit"]


@pytest.mark.parametrize("name", PAGED)
def test_pages_follow_one_another(project: Project, run: Run, admin: Any, name: str) -> None:
    fill(project, run, 5)
    path = lists(project, run)[name]
    whole = admin.get(f"{path}?limit=1000").json()
    assert whole["next"] is None and len(whole["results"]) >= 5
    for limit in (1, 2, len(whole["results"])):
        assert [named(row) for row in pages(admin, path, limit)] == [named(row) for row in whole["results"]]


def test_rows_that_are_added_meanwhile_move_nothing(project: Project, run: Run, admin: Any) -> None:
    fill(project, run, 4)
    first = admin.get("runs/minilm/versions?limit=2").json()
    fill(project, run, 2)
    second = admin.get(f"runs/minilm/versions?limit=2&cursor={first['next']}").json()
    assert [row["number"] for row in first["results"] + second["results"]] == [3, 2, 1, 0]


def _encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    ["x", "!!!", "é", _encoded([]), _encoded({}), _encoded(["a"]), _encoded([None]), _encoded([1, 2]), _encoded([[1]]),
     _encoded([1 << 70]), _encoded(["\0"]), _encoded([1e400]), "A" * 2000, _encoded([True])[:-1]],
)  # fmt: skip
def test_cursors_that_nobody_gave_out_are_400(project: Project, run: Run, admin: Any, cursor: str) -> None:
    answer = admin.get(f"runs/minilm/versions?cursor={cursor}")
    assert answer.status_code in {200, 400}
    if answer.status_code == 400:
        problem(answer, 400, "invalid_request")
    dated = admin.get(f"runs?cursor={cursor}")
    problem(dated, 400, "invalid_request")


@pytest.mark.parametrize(
    "moment", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-01T00:00:00", "x", ""]
)
def test_moments_of_a_cursor_are_checked(project: Project, run: Run, admin: Any, moment: str) -> None:
    answer = admin.get(f"runs?cursor={_encoded([moment, str(run.pk)])}")
    problem(answer, 400, "invalid_request")


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e3", "9" * 30])
def test_limits(project: Project, run: Run, admin: Any, limit: str) -> None:
    problem(admin.get(f"jobs?limit={limit}"), 400, "invalid_request")


def test_filters(project: Project, run: Run, admin: Any) -> None:
    fill(project, run, 4)
    make.mk_version(run, 4, state="validating", parent=run.versions.get(number=3))

    def numbers(query: str) -> list[int]:
        return [row["number"] for row in admin.get(f"runs/minilm/versions?{query}").json()["results"]]

    assert numbers("state=validating") == [4]
    assert numbers("after=1&before=4") == [3, 2]
    assert numbers("epoch=1") == [1] and numbers("epoch=9") == []

    def found(path: str) -> list[str]:
        return [row["name"] for row in admin.get(path).json()["results"]]

    assert found("runs?name=RUN-2") == ["run-2"] and found("runs?served_format=fp8") == []
    assert found("islands?run=minilm&provider=hetzner&enabled=true") == [f"island{number}" for number in range(4)]
    assert found("islands?enabled=false") == found("islands?run=run-1") == found("islands?region=nowhere") == []
    assert {row["kind"] for row in admin.get("jobs?state=unfinished").json()["results"]} == {"replay"}
    assert {row["state"] for row in admin.get("jobs?kind=verify&run=minilm").json()["results"]} == {"succeeded"}


@pytest.mark.parametrize(
    "path",
    ["jobs?state=nice", "jobs?kind=%00", "runs?name=%00", f"runs?name={'x' * 200}", "runs/minilm/versions?state=x",
     "runs/minilm/versions?epoch=-1", "runs/minilm/versions?before=1.5", "runs/minilm/versions?after=NaN",
     f"runs/minilm/versions?after={'9' * 30}", "islands?enabled=maybe"],
)  # fmt: skip
def test_filters_that_can_not_be_are_400(project: Project, run: Run, admin: Any, path: str) -> None:
    problem(admin.get(path), 400, "invalid_request")


def test_a_list_holds_no_files(run: Run, token: Callable[..., Api]) -> None:
    series(run, 2)
    api = token("viewer")
    rows = api.get("runs/minilm/versions").json()["results"]
    assert [row["anchored"] for row in rows] == [False, True]
    assert all("patch" not in row and "anchor" not in row for row in rows)
    one = api.get("runs/minilm/versions/0").json()
    assert one["anchor"]["files"] and one["patch"] is None
