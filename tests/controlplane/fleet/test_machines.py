"""An island's state machine under any order of orders and heartbeats: what it is told always follows from the orders,
and exactly the right credentials open something.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from controlplane.accounts import services as accounts
from controlplane.accounts.principals import island_of
from controlplane.api.authentication import principal
from controlplane.audit.models import Entry
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Island
from controlplane.registry.errors import Changed, WrongState
from controlplane.registry.models import Channel, Project, Run
from tests.controlplane.conftest import enrol
from tests.controlplane.making import series

MODEST = settings(max_examples=10, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))


class IslandMachine(RuleBasedStateMachine):
    """A model of one island: enabled, drained, pinned; which credential works, and which one is on trial."""

    run: Run
    project: Project

    def __init__(self) -> None:
        super().__init__()
        self.atomic = transaction.atomic()
        self.atomic.__enter__()
        self.row, credential = enrol(self.run, "machine")
        self.enabled, self.draining, self.pinned = True, False, None
        self.current: str | None = credential
        self.trial: str | None = None
        self.dead: list[str] = []
        self.rotating = False
        self.serial = 0

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.atomic.__exit__(None, None, None)

    def island(self) -> Island:
        return selectors.island(self.project, self.row.pk)

    @rule(on=st.booleans(), seen=st.booleans())
    def enable(self, on: bool, seen: bool) -> None:
        island = self.island()
        services.set_enabled(island, on, reason="why", actor="owner", seen=island.revision if seen else None)
        self.enabled = on

    @rule()
    def stale(self) -> None:
        island = self.island()
        entries = Entry.objects.count()
        with pytest.raises(Changed):
            services.drain(island, actor="owner", seen=island.revision + 1)
        assert Entry.objects.count() == entries

    @rule(seconds=st.integers(1, 1000))
    def drain(self, seconds: int) -> None:
        services.drain(self.island(), deadline=timedelta(seconds=seconds), actor="owner")
        self.draining = True

    @rule()
    def stop_drain(self) -> None:
        services.stop_drain(self.island(), actor="owner")
        self.draining = False

    @rule(number=st.integers(0, 2))
    def pin(self, number: int) -> None:
        services.pin(self.island(), number, actor="owner")
        self.pinned = number

    @rule()
    def unpin(self) -> None:
        services.unpin(self.island(), actor="owner")
        self.pinned = None

    @rule()
    def rotate(self) -> None:
        if self.current is None:
            with pytest.raises(WrongState):
                services.rotate_credential(self.island(), actor="owner")
            return
        services.rotate_credential(self.island(), actor="owner")
        self.rotating = True

    @rule()
    def revoke(self) -> None:
        services.revoke_credential(self.island(), actor="owner")
        self.dead += [text for text in (self.current, self.trial) if text is not None]
        self.current = self.trial = None
        self.rotating = False

    @rule()
    def beat(self) -> None:
        if self.current is None:
            return
        orders = self.call(self.current)
        if self.rotating:
            assert orders["credential"] not in {None, self.current, self.trial}
            self.dead += [self.trial] if self.trial is not None else []
            self.trial = orders["credential"]
        else:
            assert orders["credential"] is None

    @rule()
    def beat_with_the_new_credential(self) -> None:
        if self.trial is None:
            return
        assert self.call(self.trial)["credential"] is None
        assert self.current is not None
        self.dead.append(self.current)
        self.current, self.trial, self.rotating = self.trial, None, False

    def call(self, credential: str) -> dict[str, Any]:
        token = accounts.authenticate_token(credential)
        assert token is not None
        caller = principal(self.project.slug, token, None)
        assert caller.island is not None and island_of(token) is not None
        services.heartbeat(caller.island, version=None, digest="", epoch=None, phase="idle", reason="")
        orders = services.standing(selectors.island(self.project, caller.island.pk), token)
        assert (orders["channel"] == "latest") == (self.pinned is None)
        assert (orders["drain"] is not None) == self.draining
        return orders

    @invariant()
    def the_rows_agree(self) -> None:
        row = selectors.row(self.island())
        assert (row.island.enabled, row.pinned) == (self.enabled, self.pinned)
        if self.current is None or not self.enabled:
            assert row.health == "disabled"
        else:
            assert (row.health == "draining") == self.draining
        for text in self.dead:
            assert accounts.authenticate_token(text) is None

    @invariant()
    def a_serial_never_goes_back(self) -> None:
        channel = Channel.objects.filter(run=self.run, name__startswith=Channel.PINS).first()
        if channel is not None:
            assert channel.serial >= self.serial
            self.serial = channel.serial


@pytest.mark.django_db
def test_an_island_under_any_order_of_orders(run: Run, project: Project) -> None:
    series(run, 3)
    IslandMachine.run, IslandMachine.project = run, project
    run_state_machine_as_test(IslandMachine, settings=MODEST)
