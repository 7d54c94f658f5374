"""Enrolment: a token becomes a credential, kept in the store for its owner alone; where operators approve islands, the
island waits until they have compared its key.

It must never send the token when a credential for the same server and project is there: most tokens work once. At
another address without a token, the credential is used as it is: a control plane may move. A token that is not for
enrolling is none: a trainer's may lie in the same environment.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, replace

from mailboat import __version__
from mailboat.client import Api
from mailboat.errors import ApiError, StoreError, Unreachable
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
from mailboat.patience import pause_before
from mailboat.replies import Enrolment

BEARER = "mb_"  # how tokens of trainers and people begin; enrolment tokens begin with mbe_


def credential(store: Store, api: Api, token: str | None, *, engine: Weights, stop: Stop, say: Say) -> Enrolment:
    """The island's enrolment: from the store, else by ``token``; waits for a server that can't be reached.

    Raises StoreError without token and credential, Unauthorised for a token that is unknown, expired or used.
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
    if enrolment is not None:
        return _approved(store, api, enrolment, stop=stop, say=say)
    if not token:
        raise StoreError(
            f"The store {store.root} holds no credential for {api.project} on {api.server}; start the island with "
            f"--token once. If it was enrolled before, {ANEW}.{other}"
        )
    enrolment = _enrol(api, token, private_key(store), engine=engine, stop=stop, say=say)
    _keep(store, api, enrolment)
    return _approved(store, api, enrolment, stop=stop, say=say)


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


def _keep(store: Store, api: Api, enrolment: Enrolment) -> None:
    try:
        before = read_credential(store) or {}
    except CredentialDamaged:
        before = {}
    trial = {NEXT: before[NEXT]} if before.get(CREDENTIAL) == enrolment.credential and NEXT in before else {}
    kept = {name: value for name, value in asdict(enrolment).items() if name != "keys"}  # see trust.Trust
    write_credential(store, {"server": api.server, "project": api.project, **kept, **trial})


def _approved(store: Store, api: Api, enrolment: Enrolment, *, stop: Stop, say: Say) -> Enrolment:
    """Waits until an operator has approved the island, where that is asked for. Raises Unauthorised, NotFound when they
    refused.
    """
    if not enrolment.pending:
        return enrolment
    key = fingerprint(public_half(private_key(store)))
    say(f"waiting for an operator to approve island {enrolment.name}; its key is {key}")
    api.token = enrolment.credential
    attempt = 0
    while True:
        with stop.interruptible():
            try:
                if not api.island(enrolment.island).pending:
                    break
                attempt = 0
            except Unreachable:
                attempt += 1
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    raise
                attempt += 1
            stop.sleep(enrolment.heartbeat_seconds + (pause_before(min(attempt, 8)) if attempt else 0.0))
    say("approved")
    enrolment = replace(enrolment, pending=False)
    _keep(store, api, enrolment)
    return enrolment


def _enrol(api: Api, token: str, private: str, *, engine: Weights, stop: Stop, say: Say) -> Enrolment:
    about = {
        "engine": engine.name,
        "agent_version": __version__,
        "cores": os.cpu_count() or 1,
        "codecs": list(KNOWN_CODECS),
        "hostname": platform.node(),
        "public_key": public_half(private),
        "signature": sign_enrolment(private, api.project, token),
    }
    attempt = 0
    while True:
        try:
            with stop.interruptible():
                return api.enrol(token, about)
        except Unreachable as error:
            problem: Exception = error
        except ApiError as error:
            if error.status < 500 and error.status != 429:
                raise
            problem = error
        attempt += 1
        if attempt == 1:
            say(f"waiting for the control plane: {problem}")
        with stop.interruptible():
            stop.sleep(pause_before(attempt))
