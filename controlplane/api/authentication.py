"""Finds out who is asking: a bearer token, or a person with a session."""

# ruff: noqa: ARG002  the signatures are those of DRF

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated
from rest_framework.request import Request

from controlplane.accounts import principals, services
from controlplane.accounts.models import Token
from controlplane.accounts.principals import Principal
from controlplane.fleet import services as fleet
from controlplane.registry.errors import Missing


class TokenHolder:
    """Stands where Django keeps the person, for a request with a token."""

    is_authenticated = True
    is_active = True
    is_anonymous = False

    def __init__(self, token: Token) -> None:
        self.token = token


class BearerAuthentication(BaseAuthentication):
    """`Authorization: Bearer mb_...`."""

    def authenticate(self, request: Request) -> tuple[TokenHolder, Token] | None:
        """The token's holder; None when there is no such header. Raises AuthenticationFailed."""
        token = bearer(request.headers.get("Authorization", ""))
        return None if token is None else (TokenHolder(token), token)

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401."""
        return 'Bearer realm="mailboat"'


class PersonAuthentication(SessionAuthentication):
    """A session, with Django's protection against forged requests."""

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401."""
        return 'Bearer realm="mailboat"'


def bearer(header: str) -> Token | None:
    """The token of an Authorization header; None without one. Raises AuthenticationFailed."""
    if not header:
        return None
    scheme, _, plaintext = header.partition(" ")
    token = services.authenticate_token(plaintext.strip()) if scheme.lower() == "bearer" else None
    if token is None:
        raise AuthenticationFailed("The token is wrong, expired or revoked; ask an admin for a new one.")
    return token


def principal(slug: str, token: Token | None, user: Any) -> Principal:
    """The caller in a project. Raises NotAuthenticated, Missing."""
    if token is None and not getattr(user, "is_authenticated", False):
        raise NotAuthenticated("Send a token as `Authorization: Bearer ...`, or log in.")
    found = principals.of_token(token, slug) if token is not None else principals.of_person(user, slug)
    if found is None:
        raise Missing(f"There is no project {slug} for you.")
    if token is not None and found.island is not None:
        fleet.confirm(found.island, token)  # the first call with a new credential ends the old one
    return found


def principal_of(request: HttpRequest, slug: str) -> Principal:
    """The caller of a plain Django view. Raises AuthenticationFailed, NotAuthenticated, Missing."""
    return principal(slug, bearer(request.headers.get("Authorization", "")), getattr(request, "user", None))
