"""Who joins and who leaves after which version: one joins after the first; later one leaves and soon comes back."""

from __future__ import annotations

from dataclasses import dataclass

CYCLE = 4  # versions from one leaving to the next


@dataclass(frozen=True, slots=True)
class Move:
    """One island, by its index, comes or goes."""

    index: int
    joins: bool


def move_after(version: int, islands: int) -> Move | None:
    """The move after a version, when there are two islands or more."""
    if islands < 2:
        return None
    if version == 1:
        return Move(islands - 1, joins=True)
    turn, phase = divmod(version, CYCLE)
    if phase in {2, 3}:
        return Move(turn % islands, joins=phase == 3)
    return None
