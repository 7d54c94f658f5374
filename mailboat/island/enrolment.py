"""Enrolment: a token becomes a credential, kept in the store for its owner alone; where operators approve islands, the
island waits until they have compared its key.

It must never send the token when a credential for the same server and project is there that may still work: most tokens
work once. Only where the control plane itself answers that it knows none of the store's credentials (401) is a token
sent, and only one that the island has not enrolled with: a removed island comes back with what it holds, and a reusable
key brings no refused one back. When that token does not work either, the credential stays and the island goes on with
what it holds. At another address without a token, the credential is used as it is: a control plane may move. A token
that is not for enrolling is none: a trainer's may lie in the same environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from dataclasses import asdict, replace
from typing import Any

from mailboat import __version__
from mailboat.client import Api
from mailboat.errors import ApiError, MailboatError, StoreError, Unreachable
from mailboat.identity import fingerprint, public_half, sign_enrolment
from mailboat.island.engines.engine import Weights
from mailboat.island.holding import Say
from mailboat.island.keys import (
    ANEW,
    CREDENTIAL,
    NEXT,
    CredentialDamaged,
    private_key,
    read_credential,
    write_credential,
)
from mailboat.island.stop import Stop
from mailboat.island.store import Store
from mailboat.patch.format import KNOWN_CODECS
from mailboat.patience import BUSY, pause_before
from mailboat.replies import Enrolment

BEARER = "mb_"  # how tokens of trainers and people begin; enrolment tokens begin with mbe_
ENROLLED_WITH = "enrolled-with"  # the note with the digest of the token that the island enrolled with
NOT_KNOWN = (401, "unauthorised")  # what the control plane says of a credential that it does not know or has revoked
LOOK_SECONDS = 5.0  # a look at whether a credential still works; an island that serves must not wait for long
ONCE_SECONDS = 30.0  # after which an island that runs `once` begins no further try


def credential(
    store: Store, api: Api, token: str | None, *, once: bool = False, engine: Weights, stop: Stop, say: Say
) -> Enrolment:
    """The island's enrolment: from the store, else by ``token``; waits for a server that can't be reached, with
    ``once`` for a few tries.

    Raises StoreError without token and credential, Unauthorised for a token that is unknown, expired or used, with
    ``once`` Unreachable or ApiError.
    """
    other = (
        " (What --token or MAILBOAT_TOKEN gives is a trainer's or a person's token; enrolment tokens begin with mbe_.)"
        if token and token.startswith(BEARER)
        else ""
    )
    token = None if other else token
    try:
        enrolment = _kept(store, api, token, say)
    except CredentialDamaged as damage:
        if not token:
            raise StoreError(f"{damage}{other}") from damage
        say(f"{damage} The island enrols again.")
        enrolment = None
    if enrolment is not None and token and _refused(store, api, token, enrolment, stop):
        enrolment = _anew(store, api, token, enrolment, engine=engine, stop=stop, say=say)
    if enrolment is not None:
        return _approved(store, api, enrolment, once=once, stop=stop, say=say)
    if not token:
        raise StoreError(
            f"The store {store.root} holds no credential for {api.project} on {api.server}; start the island with "
            f"--token once. If it was enrolled before, {ANEW}.{other}"
        )
    enrolment = _enrol(api, token, private_key(store), once=once, engine=engine, stop=stop, say=say)
    _keep(store, api, enrolment, token)
    return _approved(store, api, enrolment, once=once, stop=stop, say=say)


def _refused(store: Store, api: Api, token: str, enrolment: Enrolment, stop: Stop) -> bool:
    """Whether the control plane says that it knows none of the store's credentials, while ``token`` is a new one. A
    server that is away, busy or answers anything else has not said so.
    """
    if (store.note(ENROLLED_WITH) or {}).get("sha256") == _digest(token):
        return False
    on_trial = (read_credential(store) or {}).get(NEXT)
    try:
        return all(_unknown(api, enrolment.island, it, stop) for it in (on_trial, enrolment.credential) if it)
    finally:
        api.token = None


def _unknown(api: Api, island: str, kept: str, stop: Stop) -> bool:
    api.token = kept
    try:
        with stop.interruptible():
            api.island(island, timeout=LOOK_SECONDS)
    except ApiError as error:
        return (error.status, error.code) == NOT_KNOWN
    except MailboatError:
        return False
    return False


def _anew(store: Store, api: Api, token: str, before: Enrolment, *, engine: Weights, stop: Stop, say: Say) -> Enrolment:
    """The enrolment by a new token in the place of one whose credential is refused; that one when this fails."""
    say(f"the credential of island {before.name} is refused for good; the island enrols anew with the token given")
    try:
        with stop.interruptible():
            enrolment = api.enrol(token, _about(api, token, private_key(store), engine))
    except MailboatError as error:
        say(f"it could not enrol anew, and goes on with what it holds: {error}")
        return before
    _keep(store, api, enrolment, token)
    return enrolment


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _kept(store: Store, api: Api, token: str | None, say: Say) -> Enrolment | None:
    kept = read_credential(store)
    if kept is None:
        return None
    server, project = kept.pop("server", None), kept.pop("project", None)
    moved = server != api.server
    if project != api.project or (moved and token):
        return None
    kept.pop(NEXT, None)  # see keys.Credentials
    try:
        enrolment = Enrolment(**kept)
    except TypeError:
        raise CredentialDamaged(f"The credential in {store.root} lacks something; {ANEW}.") from None
    if moved:  # a control plane may get another address; whoever starts the island names it, so that is no stranger
        say(f"the credential was made at {server} and is used at {api.server} from now on")
        _keep(store, api, enrolment)
    return enrolment


def _keep(store: Store, api: Api, enrolment: Enrolment, token: str | None = None) -> None:
    try:
        before = read_credential(store) or {}
    except CredentialDamaged:
        before = {}
    trial = {NEXT: before[NEXT]} if before.get(CREDENTIAL) == enrolment.credential and NEXT in before else {}
    kept = {name: value for name, value in asdict(enrolment).items() if name != "keys"}  # see trust.Trust
    write_credential(store, {"server": api.server, "project": api.project, **kept, **trial})
    if token:
        store.set_note(ENROLLED_WITH, {"sha256": _digest(token)})


def _approved(store: Store, api: Api, enrolment: Enrolment, *, once: bool, stop: Stop, say: Say) -> Enrolment:
    """Waits until an operator has approved the island, where that is asked for. Raises Unauthorised, NotFound when they
    refused, with ``once`` Unreachable or ApiError.
    """
    if not enrolment.pending:
        return enrolment
    key = fingerprint(public_half(private_key(store)))
    say(f"waiting for an operator to approve island {enrolment.name}; its key is {key}")
    api.token = enrolment.credential
    attempt, since = 0, time.monotonic()
    while True:
        with stop.interruptible():
            try:
                if not api.island(enrolment.island).pending:
                    break
                attempt, since = 0, time.monotonic()
            except (Unreachable, ApiError) as error:
                attempt += 1
                if not _passes(error) or (once and _enough(api, attempt, since)):
                    raise
            stop.sleep(enrolment.heartbeat_seconds + (pause_before(min(attempt, 8)) if attempt else 0.0))
    say("approved")
    enrolment = replace(enrolment, pending=False)
    _keep(store, api, enrolment)
    return enrolment


def _enrol(api: Api, token: str, private: str, *, once: bool, engine: Weights, stop: Stop, say: Say) -> Enrolment:
    about = _about(api, token, private, engine)
    attempt, since = 0, time.monotonic()
    while True:
        try:
            with stop.interruptible():
                return api.enrol(token, about)
        except (Unreachable, ApiError) as error:
            attempt += 1
            if not _passes(error) or (once and _enough(api, attempt, since)):
                raise
            if attempt == 1:
                say(f"waiting for the control plane: {error}")
        with stop.interruptible():
            stop.sleep(pause_before(attempt))


def _about(api: Api, token: str, private: str, engine: Weights) -> dict[str, Any]:
    """What the machine says of itself, and the proof that it has the private half of its key."""
    return {
        "engine": engine.name,
        "agent_version": __version__,
        "cores": os.cpu_count() or 1,
        "codecs": list(KNOWN_CODECS),
        "hostname": platform.node(),
        "public_key": public_half(private),
        "signature": sign_enrolment(private, api.project, token),
    }


def _passes(error: Unreachable | ApiError) -> bool:
    """Whether it is trouble that may go by, and no refusal."""
    return isinstance(error, Unreachable) or error.status >= 500 or error.status == BUSY


def _enough(api: Api, attempt: int, since: float) -> bool:
    """Whether an island that runs once has tried for long enough: a try at a silent address takes ten seconds."""
    return attempt >= api.attempts or time.monotonic() - since >= ONCE_SECONDS
