"""What a heartbeat costs: a hundred of them come each second from a thousand islands."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.accounts import principals, services
from controlplane.accounts.models import Token
from controlplane.fleet.models import Island
from controlplane.prepared import Prepared
from tests.controlplane.conftest import Api

pytestmark = pytest.mark.django_db


def test_a_heartbeat_is_four_statements(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    body = {"phase": "idle", "reason": "", "time": time.time()}
    api.post(f"islands/{island.pk}/heartbeat", body)  # the first one notes that the token is used
    with CaptureQueriesContext(connection) as asked:
        assert api.post(f"islands/{island.pk}/heartbeat", body).status_code == 200
    assert len(asked) <= 4, "\n".join(query["sql"] for query in asked)


def test_prepared_rows_are_those_of_the_queryset(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    token = Token.objects.get(pk=island.token_id)
    assert api.token is not None
    found = services.authenticate_token(api.token)
    assert found == token and found.project == island.project
    names = (island.run.name, island.channel.name, None, island.codecs)
    for again in range(2):  # the second one is written already
        with CaptureQueriesContext(connection) as asked:
            row = principals.island_of(token)
            assert row is not None
            assert (row.run.name, row.channel.name, row.pin, row.codecs) == names, again
        assert len(asked) == 1, "relations came along"
    assert row.get_deferred_fields() == set() and "head_envelope" in row.channel.get_deferred_fields()
    assert services.authenticate_token(api.token[:-1] + "x") is None


def test_a_query_that_does_not_compare_with_the_value_is_a_mistake(island: Island) -> None:
    wrong: Any = Prepared(lambda _: Island.objects.all(), -1)
    with pytest.raises(ValueError, match="compare"):
        wrong.rows(1)


def test_a_beat_keeps_what_it_does_not_say(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    address = f"islands/{island.pk}/heartbeat"
    api.post(address, {"phase": "idle", "alarm": "A forged head.", "trusted_keys": ["ab" * 32], "time": 5.0})
    island.refresh_from_db()
    began = island.alarm_at
    assert (island.alarm, island.trusted_keys) == ("A forged head.", ["ab" * 32]) and began is not None
    assert island.clock_skew_seconds is not None and island.clock_skew_seconds < -1e9
    api.post(address, {"phase": "idle", "alarm": "Another."})
    island.refresh_from_db()
    assert (island.alarm, island.alarm_at, island.clock_skew_seconds) == ("Another.", began, None)
    api.post(address, {"phase": "idle"})
    island.refresh_from_db()
    assert (island.alarm, island.alarm_at, island.trusted_keys) == ("Another.", began, ["ab" * 32])
    api.post(address, {"phase": "idle", "alarm": ""})
    island.refresh_from_db()
    assert (island.alarm, island.alarm_at) == ("", None)
