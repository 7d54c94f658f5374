"""Calls about routes: which files lead from what an island holds to a version, in how many bytes and seconds."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts import limits
from controlplane.accounts.principals import FOLLOWERS, ISLAND
from controlplane.api import answers, paging
from controlplane.api.views import ProjectView
from controlplane.fleet import measures
from controlplane.fleet.models import Island
from controlplane.registry import leases, merging, routes
from controlplane.registry.cost import Means

CORES, CODECS, NAME = 1 << 16, 50, 40
SPEED = {"type": "integer", "minimum": 1, "maximum": paging.BIG}


class Plan(ProjectView):
    """Routes."""

    roles = {"GET": FOLLOWERS}

    @extend_schema(
        parameters=[
            OpenApiParameter("from_digest", {"type": "string", "pattern": "^([0-9a-f]{64})?$"}),
            OpenApiParameter("to", {"type": "integer", "minimum": 0, "maximum": paging.BIG}),
            OpenApiParameter("link", SPEED, description="Bytes per second that the link lets pass."),
            OpenApiParameter("cores", {"type": "integer", "minimum": 1, "maximum": CORES}),
            OpenApiParameter("codecs", {"type": "string"}, description="What can be decoded, separated by commas."),
            OpenApiParameter("apply", SPEED, description="Bytes of the model per second, for a contextual patch."),
            OpenApiParameter(
                "references", {"enum": [0, 1]}, description="Whether anchors that lie elsewhere can be fetched."
            ),
            OpenApiParameter(
                "published", {"enum": [0, 1]}, description="Whether to take nothing but the publisher's own patches."
            ),
        ],
        responses=answers.Plan,
    )
    def get(self, request: Request, project: str, run: str) -> Response:
        """The route from `from_digest` (empty: nothing is held) to version `to` (the newest ready one) that is
        servable soonest. Asked by an island that would get there sooner by a patch that nobody has built yet, it
        begins to build it: `building` and `wait_seconds` say what to wait for.
        """
        island = self.caller.island if self.caller.role == ISLAND else None
        if self.caller.role == ISLAND:
            limits.take(limits.PULL, f"{self.caller.project.pk} {self.caller.actor}")
        held = request.query_params.get("from_digest", "")
        if held and not (len(held) == 64 and set(held) <= set("0123456789abcdef")):
            raise ValidationError({"from_digest": "It must be 64 hex digits."})
        means = _means(request, island)
        found, to = self.run(run), paging.number(request, "to", None)
        published, references = (paging.number(request, name, 0, high=1) for name in ("published", "references"))
        scope = routes.Scope(
            (routes.PUBLISHED if published else routes.SERVED).patches,
            (routes.ELSEWHERE if references else routes.SERVED).anchors,
        )
        ground, route = routes.search(found, held, to, means=means, scope=scope)
        asks, actor = island is not None, self.caller.actor
        building = None if published else merging.offer(found, ground, route, means, ask=asks, actor=actor)
        plan = routes.described(found, ground, route)
        if island is not None:
            leases.take_for_route(found, plan.steps, island.name)
            measures.told(island, paging.number(request, "cores", None), _codecs(request))
        answer: dict[str, Any] = plan.as_json()
        if building is not None:
            answer["building"] = building.as_json()
            answer["wait_seconds"] = round(building.wait, 3) if building.job else None
        return Response(answer)


def _means(request: Request, island: Island | None) -> Means:
    """What the caller says of itself; beyond that, what is known of the island."""
    known = (island.link_bytes_per_second, island.cores, island.apply_bytes_per_second) if island else (None,) * 3
    apply = paging.number(request, "apply", None, low=1)
    return Means.of(
        link=paging.number(request, "link", known[0], low=1),
        cores=paging.number(request, "cores", known[1] or None, low=1, high=CORES),
        apply=apply or known[2],
        quick=island.quick_bytes_per_second if island and apply is None else None,
        codecs=_codecs(request),
    )


def _codecs(request: Request) -> list[str] | None:
    """None where the caller says nothing: then it is taken to know all."""
    raw = request.query_params.get("codecs")
    if raw is None:
        return None
    names = raw.split(",")
    if len(names) > CODECS or not all(0 < len(name) <= NAME and name.isascii() for name in names):
        raise ValidationError({"codecs": f"It must be names of at most {NAME} characters, separated by commas."})
    return names
