"""Jobs: list, page, cancellation."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.jobs.models import Job
from tests import factories as make
from tests.dashboard.conftest import World


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def test_list_names_what_a_job_is_about(world: World, owner: Client) -> None:
    make.mk_job(world.project, "verify", run=world.run, params={"island": str(world.island.pk)})
    page = _page(owner, world.pages["jobs"])
    assert "demo v2" in page
    assert "fsn1-a" in page
    assert "1 of 2 versions" in page


def test_states_filter(world: World, owner: Client) -> None:
    failed = make.mk_job(world.project, "validate", state="failed", error="Digest differs.")
    page = _page(owner, world.url("jobs/?state=failed"))
    assert "Digest differs." in page
    assert f"job-{world.job.pk}" not in page
    assert f"job-{failed.pk}" in page
    assert "No job matches" in _page(owner, world.url("jobs/?state=cancelled"))
    assert owner.get(world.url("jobs/?state=nonsense&kind=nonsense&page=x")).status_code == 200


def test_list_comes_in_pages(world: World, owner: Client) -> None:
    for _ in range(35):
        make.mk_job(world.project, "verify", state="succeeded")
    assert "page=2" in _page(owner, world.pages["jobs"])
    assert f"job-{world.job.pk}" in _page(owner, world.url("jobs/?page=2"))


def test_job_page_shows_result_and_log(world: World, owner: Client) -> None:
    result = {
        "state_digest": "ab" * 32,
        "patch_bytes": 2048,
        "seconds": 1.5,
        "identical": True,
        "first": {"tensor": "a.weight", "index": 7},
    }
    job = make.mk_job(world.project, "replay", run=world.run, state="succeeded", params={"version": 1}, result=result)
    make.mk_event(job, "Fine.")
    make.mk_event(job, "Careful.", "warning")
    page = _page(owner, world.url(f"jobs/{job.pk}/"))
    for words in ("abababababab", "2.00 KiB", "1.5 s", "yes", "first tensor", "a.weight", "Fine.", "Careful."):
        assert words in page, words
    warnings = _page(owner, world.url(f"jobs/{job.pk}/?level=warning"))
    assert "Careful." in warnings
    assert "Fine." not in warnings


def test_failed_job_gives_its_reason(world: World, owner: Client) -> None:
    job = make.mk_job(world.project, "verify", state="failed", error="Tensor a.weight differs first at 7.")
    assert "Tensor a.weight differs first at 7." in _page(owner, world.url(f"jobs/{job.pk}/"))


@pytest.mark.parametrize(
    ("state", "after", "words"),
    [
        ("queued", "cancelled", "The job is cancelled."),
        ("running", "cancelling", "Asked the worker to stop"),
        ("succeeded", "succeeded", "The job has already ended: succeeded."),
    ],
)
def test_cancel_tells_the_truth(world: World, owner: Client, state: str, after: str, words: str) -> None:
    job = make.mk_job(world.project, "replay", run=world.run, state=state, params={"version": 1})
    page = owner.post(world.url(f"jobs/{job.pk}/cancel/"), follow=True).content.decode()
    job.refresh_from_db()
    assert job.state == after
    assert words in page


def test_finished_job_has_no_cancel_button(world: World, owner: Client) -> None:
    Job.objects.filter(pk=world.job.pk).update(state="succeeded", finished_at=timezone.now())
    assert "Cancel the job" not in _page(owner, world.pages["job"])


def test_project_without_jobs_says_where_they_come_from(world: World, owner: Client) -> None:
    Job.objects.all().delete()
    assert "No job yet" in _page(owner, world.pages["jobs"])
