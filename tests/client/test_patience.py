"""How long trouble is borne, by a clock that only pauses move."""

from __future__ import annotations

import pytest

from mailboat.errors import ApiError, MailboatError, Misaddressed, Unreachable
from mailboat.patience import ATTEMPTS, Tries, pause_before


class Clock:
    """A clock that goes on while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Goes on by so many seconds."""
        self.now += seconds
        self.pauses.append(seconds)


def borne(patience: float, error: MailboatError, *, passing: bool = False) -> Clock:
    """The clock after work that fails with ``error`` every time was given up."""
    clock = Clock()
    tries = Tries(ATTEMPTS, patience, clock.sleep, lambda: clock.now)
    while tries.another(error, passing=passing):
        assert len(clock.pauses) < 10_000
    return clock


def status(code: int, retry_after: float = 0.0) -> ApiError:
    """A refusal."""
    return ApiError(code, "on_order", "The server says on_order.", retry_after)


@pytest.mark.parametrize("error", [Unreachable("gone"), status(502), status(503), status(504), status(429)])
def test_outages_are_borne_for_as_long_as_was_said(error: MailboatError) -> None:
    assert 300 <= borne(300.0, error).now - 1000 <= 306


def test_without_patience_tries_are_counted() -> None:
    assert len(borne(0.0, Unreachable("gone")).pauses) == ATTEMPTS - 1
    assert borne(0.0, status(429)).pauses == []


@pytest.mark.parametrize("error", [Misaddressed("who?"), status(401), status(409), status(422), status(500)])
def test_what_waiting_does_not_mend_is_not_waited_for(error: MailboatError) -> None:
    assert borne(300.0, error).pauses == []


def test_what_may_pass_without_an_outage_is_tried_a_few_times() -> None:
    assert len(borne(300.0, status(409), passing=True).pauses) == ATTEMPTS - 1


def test_the_server_may_ask_for_longer_pauses_within_patience() -> None:
    assert borne(300.0, status(429, 60.0)).pauses[:5] == [60.0] * 5
    assert borne(30.0, status(503, 3600.0)).pauses[0] == 30.0


def test_progress_begins_anew() -> None:
    clock = Clock()
    tries = Tries(ATTEMPTS, 10.0, clock.sleep, lambda: clock.now)
    for _ in range(100):
        assert tries.another(Unreachable("gone"))
        tries.gained()
    assert max(clock.pauses) <= 0.2


def test_the_ten_thousandth_try_has_a_pause_too() -> None:
    assert 0 < pause_before(10_000) <= 5.0
