"""Calls about who does the background work: queues, workers, the schedule; a job's log, and running it again."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

import uuid

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import OPERATORS, PEOPLE, READERS
from controlplane.api import paging, people_answers
from controlplane.api import people_representations as show
from controlplane.api import representations as rows
from controlplane.api.answers import JobInShort, page_of
from controlplane.api.views import ProjectView
from controlplane.jobs import selectors, services
from controlplane.jobs.models import JobEvent


class Queues(ProjectView):
    """What waits."""

    roles = {"GET": PEOPLE}

    @extend_schema(operation_id="queues_list", responses=page_of(people_answers.Queue))
    def get(self, request: Request, project: str) -> Response:
        """Depth, oldest age and workers of each queue. Jobs are the project's; messages and workers are everybody's."""
        return Response({"results": [show.queue(row) for row in selectors.queues(self.caller.project)], "next": None})


class Workers(ProjectView):
    """Who works."""

    roles = {"GET": PEOPLE}

    @extend_schema(operation_id="workers_list", responses=page_of(people_answers.Worker))
    def get(self, request: Request, project: str) -> Response:
        """The processes that are there or got lost."""
        found = selectors.workers(self.caller.project)
        return Response({"results": [show.worker(row) for row in found], "next": None})


class Schedule(ProjectView):
    """What runs by the clock."""

    roles = {"GET": PEOPLE}

    @extend_schema(operation_id="schedule_list", responses=page_of(people_answers.ScheduleEntry))
    def get(self, request: Request, project: str) -> Response:
        """Every entry with its last run."""
        return Response({"results": [show.schedule_entry(row) for row in selectors.schedule()], "next": None})


class JobEvents(ProjectView):
    """A job's log."""

    roles = {"GET": READERS}

    @extend_schema(
        operation_id="job_events_list",
        parameters=[
            OpenApiParameter("after", {"type": "integer", "minimum": 0, "maximum": paging.BIG}),
            OpenApiParameter("level", str, enum=JobEvent.Level.values),
            *paging.PARAMETERS[:1],
        ],
        responses=people_answers.JobLines,
    )
    def get(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """Oldest first, after the line numbered `after`; `level` leaves out what matters less."""
        level = request.query_params.get("level", "")
        if level and level not in JobEvent.Level.values:
            raise ValidationError({"level": f"It must be one of {', '.join(JobEvent.Level.values)}."})
        limit = paging.number(request, "limit", paging.PAGE, low=1, high=paging.MAX_PAGE) or paging.PAGE
        after = paging.number(request, "after", 0) or 0
        row = selectors.job(self.caller.project, job)
        found = selectors.events(row, after=after, limit=limit + 1, level=level)
        following = found[limit - 1].pk if len(found) > limit else None
        return Response({"results": [show.job_event(line) for line in found[:limit]], "next": following})


class RerunJob(ProjectView):
    """The same work once more."""

    roles = {"POST": OPERATORS}

    @extend_schema(request=None, responses={200: JobInShort, 202: JobInShort})
    def post(self, request: Request, project: str, job: uuid.UUID) -> Response:
        """A new job (202) with the same parameters, or the unfinished one that does the same (200). 409
        `not_rerunnable` for one that did not fail, and for those that end with their version.
        """
        self.no_body(request)
        again, new = services.rerun(selectors.job(self.caller.project, job), self.caller.actor)
        return Response(rows.job(selectors.job(self.caller.project, again.pk)), status=202 if new else 200)
