"""Enrolment: a one-time token becomes a credential, kept in the store for its owner alone.

It must never send the token when a credential for the same server and project is there: a token works once.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict

from mailboat import __version__
from mailboat.client import Api, pause_before
from mailboat.errors import ApiError, StoreError, Unreachable
from mailboat.island.engines.checkpoint import CheckpointEngine
from mailboat.island.holding import Say
from mailboat.island.stop import Stop
from mailboat.island.store import Store
from mailboat.replies import Enrolment


def credential(
    store: Store, api: Api, token: str | None, *, engine: CheckpointEngine, stop: Stop, say: Say
) -> Enrolment:
    """The island's enrolment: from the store, else by ``token``; waits for a server that can't be reached.

    Raises StoreError without token and credential, Unauthorised for a token that is unknown, expired or used.
    """
    kept = store.note("credential")
    if kept is not None and (kept.pop("server", None), kept.pop("project", None)) == (api.server, api.project):
        try:
            return Enrolment(**kept)
        except TypeError:
            say("The stored credential is damaged; the island enrols again.")
    if not token:
        raise StoreError(
            f"The store {store.root} holds no credential for {api.server}; start the island with --token once."
        )
    enrolment = _enrol(api, token, engine=engine, stop=stop, say=say)
    store.set_note("credential", {"server": api.server, "project": api.project, **asdict(enrolment)})
    return enrolment


def _enrol(api: Api, token: str, *, engine: CheckpointEngine, stop: Stop, say: Say) -> Enrolment:
    about = {
        "engine": engine.name,
        "agent_version": __version__,
        "cores": os.cpu_count() or 1,
        "codecs": list(engine.codecs),
        "hostname": platform.node(),
    }
    attempt = 0
    while True:
        try:
            with stop.interruptible():
                return api.enrol(token, about)
        except Unreachable as error:
            problem: Exception = error
        except ApiError as error:
            if error.status < 500:
                raise
            problem = error
        attempt += 1
        if attempt == 1:
            say(f"waiting for the control plane: {problem}")
        with stop.interruptible():
            stop.sleep(pause_before(attempt))
