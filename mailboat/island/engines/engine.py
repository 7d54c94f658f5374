"""What an island asks of its engine, and what the sidecar asks of each server behind it.

`Weights` is the holding's side: one thing that holds one version. `Server` is one engine process with an HTTP side,
driven step by step by `mailboat.island.sidecar.served`. Neither may ever claim bytes that it has not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mailboat.digest import Sums
from mailboat.errors import MailboatError
from mailboat.image import Image, Overlay
from mailboat.island.sidecar.types import Applied


class EngineError(MailboatError):
    """An engine did not do what it was asked for; its weights may be half written."""

    code = "engine_failed"


class EngineUnreachable(EngineError):  # noqa: N818 - as the library's other errors, named for what happened
    """An engine does not answer; `hung`: it took the connection and stayed silent."""

    code = "engine_unreachable"

    def __init__(self, sentence: str, *, hung: bool = False) -> None:
        self.hung = hung
        super().__init__(sentence)


class EngineBusy(EngineUnreachable):
    """An engine's server is well, and what it asked its workers is not answered: a long step, or a hang."""

    code = "engine_busy"


class EngineAsleep(EngineUnreachable):
    """An engine gave its memory away for a while; its weights may not be touched before it is woken."""

    code = "engine_asleep"


class EngineRefused(EngineError):  # noqa: N818 - named for what happened
    """An engine answered that it won't, before it touched anything."""

    code = "engine_refused"


class Weights(Protocol):
    """What holds the island's weights."""

    name: str

    def load(self, image: Image, applied: Applied) -> None:
        """Holds what the image holds, after a start, a seed or damage. Raises EngineError."""

    def commit(self, image: Image, overlay: Overlay, applied: Applied) -> None:
        """Moves engine and image to the overlay's target. Raises CommitDeferred when nothing was touched."""

    def relabel(self, image: Image, applied: Applied) -> None:
        """The same bytes under another version's number."""

    def verify(self, image: Image) -> None:
        """Scans the image; raises DigestMismatch."""

    def audit(self, image: Image) -> None:
        """Scans live memory where that is possible, after everything else; an engine that differs is fenced."""

    def let_go(self) -> None:
        """The image is about to be closed."""

    @property
    def fence(self) -> str:
        """Why nothing is served now; empty when something is."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine says of itself: its label, None when it has no labels."""

    label: str | None


@dataclass(frozen=True, slots=True)
class Staged:
    """An overlay that an engine has mapped onto its parameters and can write without further checks."""

    handle: Mapping[str, Any]


class Server(Protocol):
    """One engine process. Every call is bounded in time and raises EngineError."""

    kind: str
    url: str

    def abandon(self) -> None:
        """The island stops: calls under way and later ones raise EngineUnreachable at once. Called by any thread."""

    def look(self) -> Look:
        """Whether it lives, and what it says it holds."""

    def keyed_routes(self) -> frozenset[str]:
        """The routes whose requests carry a key of the prefix cache, of those where that depends on the build."""

    def stage(self, image: Image, overlay: Overlay) -> Staged | None:
        """Gets an overlay ready while requests run; None when it can only be loaded from the image (way A)."""

    def drop(self, staged: Staged) -> None:
        """Gives a staged overlay's memory back."""

    def pause(self, *, resident: bool) -> None:
        """Stands still; requests stay where they are, unfinished. ``resident``: some may be running."""

    def write(self, staged: Staged, image: Image) -> Sums:
        """Writes absolute values into live parameters; returns what that did to the sums (way B)."""

    def reload(self, image: Image) -> None:
        """Loads everything from the image's folder (way A)."""

    def expect(self, label: str) -> None:
        """The label that the next reload leads to, for engines that take both in one call."""

    def label(self, text: str) -> None:
        """Tells it the version's name."""

    def resume(self) -> None:
        """Goes on."""

    def reset_cache(self) -> None:
        """Forgets what was computed from the weights held, while nothing runs. Raises EngineRefused when it won't."""

    def live_sums(self, image: Image) -> Sums | None:
        """The sums of the live parameters; None when they can't be read."""
