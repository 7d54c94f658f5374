"""Routes from the database: what is read, how much of it, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.registry import routes
from controlplane.registry.cost import Means
from controlplane.registry.models import Anchor, Project, Run, Version
from tests.factories import digest_of, mk_project, mk_run
from tests.yardstick import NET, core_seconds

pytestmark = pytest.mark.django_db

FULL = 45_000_000
VERSIONS, SPANS, QUICK = 10_000, 256, 0.05 * NET


def grow(run: Run, length: int, *, spans: int = 0, anchors: Iterable[int] = (0,)) -> None:
    """A run of `length` ready versions with steps and merged patches over aligned spans up to `spans`."""
    epoch, run_id = run.epochs.get().pk, run.pk
    state, manifest = "encode(sha256(convert_to(%s || ' ' || n, 'UTF8')), 'hex')", "md5(n::text) || md5(%s || n)"
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO registry_version (run_id, epoch_id, number, state, reason, state_digest, manifest_sha256, "
            "digests_sha256, full_bytes, side_files, checkpoint_path, published_by) "
            f"SELECT %s, %s, n, 'ready', '', {state}, {manifest}, '', %s, '[]', '', 'test' "
            "FROM generate_series(0, %s) n",
            [run_id, epoch, str(run_id), str(run_id), FULL, length - 1],
        )
        span = 1
        while span <= max(1, spans):
            cursor.execute(
                "INSERT INTO registry_patch (run_id, from_version_id, to_version_id, kind, bytes, changed, codecs) "
                "SELECT a.run_id, a.id, b.id, %s, %s, 30000, 'contextual' FROM registry_version a "
                "JOIN registry_version b ON b.run_id = a.run_id AND b.number = a.number + %s "
                "WHERE a.run_id = %s AND a.number %% %s = 0",
                ["step" if span == 1 else "merged", int(100_000 * span**0.7), span, run_id, span],
            )
            span *= 2
        for number in anchors:
            files = [{"path": "model.safetensors", "sha256": digest_of(f"a{number}"), "size": FULL}]
            Anchor.objects.create(version=Version.objects.get(run=run, number=number), files=files, bytes=FULL)
        cursor.execute("ANALYZE registry_version, registry_patch, registry_anchor")


@pytest.fixture
def run(db: None) -> Run:
    project: Project = mk_project()
    return mk_run(project)


def digest(run: Run, number: int) -> str:
    return digest_of(f"{run.pk} {number}")


def planned(run: Run, held: int | None, to: int) -> tuple[routes.Plan, int]:
    """A plan and its queries."""
    with CaptureQueriesContext(connection) as captured:
        found = routes.find(run, "" if held is None else digest(run, held), to, means=Means.of(link=1e6))
    return found, len(captured)


def quick(run: Run, held: int | None, to: int) -> bool:
    """Whether the planner's own part is."""
    return core_seconds(lambda: planned(run, held, to), QUICK) < QUICK


def test_a16_the_plan_of_a_run_with_ten_thousand_versions_is_quick(run: Run) -> None:
    """A16: 50 ms at any lag is the goal, and this a net; queries do not know how long the run or the way is."""
    grow(run, VERSIONS, spans=SPANS, anchors=(0, 5_000, 9_000))
    small = mk_run(run.project)
    grow(small, 4)
    queries = planned(small, 0, 3)[1]
    for lag in (1, 32, 255, 999, 9_999):
        found, count = planned(run, 9_999 - lag, 9_999)
        assert count == queries and quick(run, 9_999 - lag, 9_999), lag
        if lag <= SPANS:
            assert len(found.steps) <= 2 * math.log2(lag) + 2
    found, count = planned(run, None, 9_999)
    assert found.steps[0]["version"] == 9_000 and count == planned(small, None, 3)[1]
    assert quick(run, None, 9_999)
    plain = mk_run(run.project)
    grow(plain, VERSIONS)
    for lag in (1, 999, 9_999):
        assert planned(plain, 9_999 - lag, 9_999)[1] == queries, "of steps alone, all is read at once"


def test_without_merged_patches_the_steps_are_walked(run: Run) -> None:
    grow(run, 700)
    found = planned(run, 0, 699)[0]
    assert [step["via"] for step in found.steps] == ["step"] * 699


def test_what_is_ahead_of_its_target_goes_back_by_an_anchor(run: Run) -> None:
    grow(run, 40, spans=8, anchors=(0, 16))
    found = planned(run, 39, 20)[0]
    assert [step.get("version", step.get("to")) for step in found.steps] == [16, 20]
    assert found.bytes == sum(step["bytes"] for step in found.steps)
    assert found.seconds == pytest.approx(sum(step["seconds"] for step in found.steps), rel=0.2)
