"""Calls about people and keys: members, tokens, one's own sessions."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.models import AbstractBaseUser
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts import selectors, services, sessions
from controlplane.accounts.principals import ADMINS, FOLLOWERS, PEOPLE
from controlplane.api import paging, people_answers, query
from controlplane.api import people_representations as show
from controlplane.api import people_serializers as accept
from controlplane.api.answers import page_of
from controlplane.api.authentication import PersonAuthentication, TokenHolder
from controlplane.api.repeating import PARAMETER, repeatable
from controlplane.api.representations import moment
from controlplane.api.views import ProjectView
from controlplane.registry import clock
from controlplane.registry import selectors as registry
from mailboat import __version__


class Caller(ProjectView):
    """Whoever asks, so that `mailboat doctor` can tell whether a token works, and what for."""

    roles = {"GET": FOLLOWERS}
    open_to_scoped = True

    @extend_schema(responses=people_answers.Caller)
    def get(self, request: Request, project: str) -> Response:
        """Role, name, and what a token is bound to."""
        user: Any = request.user
        token = user.token if isinstance(user, TokenHolder) else None
        return Response(
            {
                "role": self.caller.role,
                "actor": self.caller.actor,
                "run": None if self.caller.run is None else self.caller.run.name,
                "island": None if self.caller.island is None else self.caller.island.name,
                "expires_at": None if token is None else moment(token.expires_at),
                "server_version": __version__,
            }
        )


class Members(ProjectView):
    """The people of a project."""

    roles = {"GET": PEOPLE, "POST": ADMINS}

    @extend_schema(operation_id="members_list", parameters=paging.PARAMETERS, responses=page_of(people_answers.Member))
    def get(self, request: Request, project: str) -> Response:
        """In the order of their numbers."""
        page = paging.page(request, selectors.members(self.caller.project), "user_id")
        return page.response([show.member(row) for row in page.rows])

    @extend_schema(parameters=[PARAMETER], request=accept.NewMember, responses={201: people_answers.Member})
    @repeatable()
    def post(self, request: Request, project: str) -> Response:
        """Takes a person in, or changes their role. 409 `last_admin` when nobody else could manage the project."""
        body = self.body(request, accept.NewMember)
        person = selectors.person(body["name"])
        services.set_membership(person, self.caller.project, body["role"], actor=self.caller.actor)
        return Response(show.member(selectors.member(self.caller.project, person.pk)), status=201)


class MemberDetail(ProjectView):
    """One person in a project."""

    roles = {"GET": PEOPLE, "PATCH": ADMINS, "DELETE": ADMINS}

    @extend_schema(responses=people_answers.Member)
    def get(self, request: Request, project: str, user: int) -> Response:
        """Their role."""
        return Response(show.member(selectors.member(self.caller.project, user)))

    @extend_schema(request=accept.MemberRole, responses=people_answers.Member)
    def patch(self, request: Request, project: str, user: int) -> Response:
        """Another role. 409 `last_admin` when nobody else could manage the project."""
        row, body = selectors.member(self.caller.project, user), self.body(request, accept.MemberRole)
        services.set_membership(row.user, row.project, body["role"], actor=self.caller.actor)
        return Response(show.member(selectors.member(self.caller.project, user)))

    @extend_schema(responses={204: None})
    def delete(self, request: Request, project: str, user: int) -> Response:
        """Takes them out at once. 409 `last_admin`."""
        services.remove_member(selectors.member(self.caller.project, user), actor=self.caller.actor)
        return Response(status=204)


class Tokens(ProjectView):
    """The API tokens of a project; credentials of islands stand among them."""

    roles = {"GET": PEOPLE, "POST": ADMINS}

    @extend_schema(operation_id="tokens_list", parameters=paging.PARAMETERS, responses=page_of(people_answers.Token))
    def get(self, request: Request, project: str) -> Response:
        """Newest first, with expiry and last use."""
        page, now = paging.page(request, selectors.tokens(self.caller.project), "-id"), clock.now()
        return page.response([show.token(row, now) for row in page.rows])

    @extend_schema(parameters=[PARAMETER], request=accept.NewToken, responses={201: people_answers.TokenOnce})
    @repeatable(secret=True)
    def post(self, request: Request, project: str) -> Response:
        """A new token; `token` is shown this once."""
        body = self.body(request, accept.NewToken)
        run = None if body["run"] is None else registry.run(self.caller.project, body["run"])
        made, plaintext = services.create_token(
            self.caller.project,
            body["role"],
            body["name"],
            run=run,
            lifetime=_days(body["days"]),
            actor=self.caller.actor,
        )
        return Response({**_shown(self, made.pk), "token": plaintext}, status=201)


class TokenDetail(ProjectView):
    """One token."""

    roles = {"GET": PEOPLE}

    @extend_schema(responses=people_answers.Token)
    def get(self, request: Request, project: str, token: int) -> Response:
        """Where it stands."""
        return Response(_shown(self, token))


class RotateToken(ProjectView):
    """A new secret for a token's holder."""

    roles = {"POST": ADMINS}

    @extend_schema(parameters=[PARAMETER], request=accept.Rotation, responses={201: people_answers.TokenOnce})
    @repeatable(secret=True)
    def post(self, request: Request, project: str, token: int) -> Response:
        """`token` is shown this once; the old secret works until the overlap ends."""
        body, old = self.body(request, accept.Rotation), selectors.token(self.caller.project, token)
        overlap = timedelta(seconds=body["overlap_seconds"])
        lifetime = _days(body["days"])
        made, plaintext = services.rotate_token(old, overlap=overlap, lifetime=lifetime, actor=self.caller.actor)
        return Response({**_shown(self, made.pk), "token": plaintext}, status=201)


class RevokeToken(ProjectView):
    """The end of a token."""

    roles = {"POST": ADMINS}

    @extend_schema(request=None, responses=people_answers.Token)
    def post(self, request: Request, project: str, token: int) -> Response:
        """At once; again changes nothing."""
        self.no_body(request)
        services.revoke_token(selectors.token(self.caller.project, token), actor=self.caller.actor)
        return Response(_shown(self, token))


class PersonView(APIView):
    """A call of a person about themselves."""

    authentication_classes = (PersonAuthentication,)
    permission_classes = ()

    person: AbstractBaseUser

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Raises NotAuthenticated for everybody else, holders of tokens among them."""
        super().initial(request, *args, **kwargs)
        user: object = request.user
        if not isinstance(user, AbstractBaseUser):
            raise NotAuthenticated("Log in: sessions belong to people.")
        self.person = user
        query.check(self, request)


class Sessions(PersonView):
    """Where the person is logged in."""

    @extend_schema(
        operation_id="sessions_list", parameters=paging.PARAMETERS, responses=page_of(people_answers.Session)
    )
    def get(self, request: Request) -> Response:
        """Newest first; the one that asks says so."""
        page = paging.page(request, sessions.sign_ins(self.person), "-id")
        return page.response([show.sign_in(row, request.session.session_key) for row in page.rows])


class SessionDetail(PersonView):
    """One of the person's sessions."""

    @extend_schema(responses={204: None})
    def delete(self, request: Request, session: int) -> Response:
        """Ends it at once."""
        sessions.end(self.person, session)
        return Response(status=204)


def _shown(view: ProjectView, token: int) -> dict[str, Any]:
    return show.token(selectors.token(view.caller.project, token), clock.now())


def _days(count: int | None) -> timedelta | None:
    return None if count is None else timedelta(days=count)
