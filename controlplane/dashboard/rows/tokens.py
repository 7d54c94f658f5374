"""Rows of tokens and enrolment tokens with where each stands."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from controlplane.accounts import selectors as accounts
from controlplane.accounts.models import Token
from controlplane.dashboard import badges
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet import selectors as fleet
from controlplane.fleet.models import EnrolmentToken
from controlplane.registry.models import Project

MOST = 200


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token. `works` while it opens something; a rotated one ends by itself."""

    token: Token
    state: Badge
    works: bool
    rotated: bool


@dataclass(frozen=True, slots=True)
class EnrolmentRow:
    """An enrolment token or a self-enrolment key."""

    token: EnrolmentToken
    state: Badge
    open: bool


def token_rows(project: Project, now: datetime, *, ended: bool) -> list[TokenRow]:
    """Tokens of programs, newest first; islands show their credentials on their own pages."""
    chosen = accounts.tokens(project, ended=ended).exclude(role=Token.Role.ISLAND)[:MOST]
    replaced = {token.rotated_from_id for token in chosen}
    rows = []
    for token in chosen:
        found = accounts.standing(token, now)
        rows.append(TokenRow(token, badge(badges.TOKEN, found.state, found.reason), found.works, token.pk in replaced))
    return rows


def enrolment_rows(project: Project, now: datetime) -> list[EnrolmentRow]:
    """Enrolment tokens that still enrol somebody."""
    rows = []
    for token in fleet.enrolment_tokens(project, working=True)[:MOST]:
        state = fleet.enrolment_state(token, now)
        rows.append(EnrolmentRow(token, badge(badges.ENROLMENT, state), state == "open"))
    return rows
