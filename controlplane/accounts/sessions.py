"""Sessions of people: where somebody is signed in, and how to end it. A session that is gone takes its note along."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib.auth.models import AbstractBaseUser
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import DateTimeField, Exists, OuterRef, QuerySet, Subquery
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest

from controlplane.accounts.models import SignIn
from controlplane.audit import services as audit
from controlplane.registry.errors import Missing


@receiver(user_logged_in, dispatch_uid="mailboat.sign_in")
def note(sender: Any, request: HttpRequest, user: AbstractBaseUser, **_: Any) -> None:  # noqa: ARG001
    """Writes down that a session began."""
    if request.session.session_key is None:
        request.session.save()
    SignIn.objects.update_or_create(
        session_key=request.session.session_key or "",
        defaults={
            "user_id": user.pk,
            "address": request.META.get("REMOTE_ADDR", "")[:45],
            "agent": request.headers.get("User-Agent", "")[:200],
        },
    )
    audit.record(None, user.get_username(), "person.login", f"user {user.get_username()}")


def sign_ins(user: AbstractBaseUser) -> QuerySet[SignIn]:
    """A person's sessions that still open something, newest first, each with `expires_at`."""
    alive = Session.objects.filter(session_key=OuterRef("session_key"), expire_date__gt=Now())
    expires: Subquery = Subquery(alive.values("expire_date")[:1], output_field=DateTimeField())
    return SignIn.objects.filter(Exists(alive), user_id=user.pk).annotate(expires_at=expires).order_by("-id")


def end(user: AbstractBaseUser, sign_in_id: int) -> None:
    """Ends one of the person's own sessions at once. Raises Missing."""
    found = SignIn.objects.filter(user_id=user.pk, pk=sign_in_id).first()
    if found is None:
        raise Missing("There is no such session of yours.")
    _end(user, [found])


def end_all(user: AbstractBaseUser, *, but: str = "") -> int:
    """Ends every session of a person except the one with the key `but`; returns how many there were."""
    return _end(user, list(SignIn.objects.filter(user_id=user.pk).exclude(session_key=but)))


def forget_ended() -> int:
    """Removes sessions that have expired and the notes of sessions that are gone. For the nightly round."""
    Session.objects.filter(expire_date__lt=Now()).delete()
    alive = Session.objects.filter(session_key=OuterRef("session_key"))
    return SignIn.objects.filter(~Exists(alive)).delete()[0]


def _end(user: AbstractBaseUser, chosen: list[SignIn]) -> int:
    keys = [item.session_key for item in chosen]
    with transaction.atomic():
        count = Session.objects.filter(session_key__in=keys).delete()[0]
        SignIn.objects.filter(session_key__in=keys).delete()
        for item in chosen:
            began: datetime = item.at
            audit.record(
                None,
                user.get_username(),
                "person.session_end",
                f"user {user.get_username()}",
                before={"address": item.address, "at": began.isoformat()},
            )
    return count
