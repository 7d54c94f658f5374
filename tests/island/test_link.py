"""The emulated link keeps its bandwidth, whatever the sizes of the pieces."""

from __future__ import annotations

import pytest

from mailboat.island.link import EmulatedLink


@pytest.mark.parametrize("piece", [100, 10_000, 1_000_000])
def test_bytes_take_their_time(piece: int) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    link = EmulatedLink(8, clock=lambda: now[0], sleep=sleep)  # one million bytes a second
    for _ in range(3_000_000 // piece):
        link.take(piece)
    assert 2.9 <= now[0] - 100.0 <= 3.1


def test_idle_time_is_not_saved_up() -> None:
    now = [0.0]
    link = EmulatedLink(8, clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    now[0] = 1000.0
    link.take(1_000_000)
    assert now[0] >= 1000.9
