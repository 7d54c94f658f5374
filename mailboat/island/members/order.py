"""What leader and members say to each other.

An order is a state of affairs, not a step: hold ``at``, have ``coming`` ready. So repeating it is harmless, and a
member that was away needs nothing but the newest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mailboat.errors import MailboatError
from mailboat.island.marker import Marker

STARTING, IDLE, PREPARING, COMMITTING, ERROR = "starting", "idle", "preparing", "committing", "error"
PREPARED, SILENT = "prepared", "silent"  # what a leader makes of it
PHASES = (STARTING, IDLE, PREPARING, COMMITTING, ERROR)


class BadWord(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """A leader or a member said something that can't be understood."""

    code = "member_protocol"


@dataclass(frozen=True, slots=True)
class Order:
    """``at``: the version to hold; ``coming``: the one to get ready for, touching nothing that is held.

    ``serial`` counts orders of one leader process, ``leader`` names that process.
    """

    leader: str
    serial: int
    at: Marker | None
    coming: Marker | None

    def as_json(self) -> dict[str, Any]:
        """The form on the wire."""
        return {
            "leader": self.leader,
            "serial": self.serial,
            "at": self.at and self.at.as_json(),
            "coming": self.coming and self.coming.as_json(),
        }

    @classmethod
    def parse(cls, body: Any) -> Order:
        """Reads an order. Raises BadWord."""
        try:
            markers = [None if body[key] is None else Marker.parse(body[key]) for key in ("at", "coming")]
            return cls(str(body["leader"]), int(body["serial"]), *markers)
        except (KeyError, TypeError, ValueError) as error:
            raise BadWord(f"The leader's order can't be understood ({error}); run the same release on both.") from error


@dataclass(frozen=True, slots=True)
class Word:
    """What a member says of itself. ``ready``: the state digest that it could hold at once; ``order``: the serial of
    the leader's order that it speaks about; ``image``: the folder that the engine's workers on its host read.
    """

    phase: str = STARTING
    reason: str = ""
    version: int | None = None
    state: str = ""
    ready: str = ""
    image: str = ""
    leader: str = ""
    order: int = -1

    def as_json(self) -> dict[str, Any]:
        """The form on the wire."""
        return asdict(self)

    @classmethod
    def parse(cls, body: Any) -> Word:
        """Reads a member's word. Raises BadWord."""
        texts = ("phase", "reason", "state", "ready", "image", "leader")
        if not isinstance(body, Mapping) or not all(isinstance(body.get(key), str) for key in texts):
            raise BadWord("A member's word has other fields than this release knows; run the same release on both.")
        version, order = body.get("version"), body.get("order")
        if body["phase"] not in PHASES or not (version is None or type(version) is int) or type(order) is not int:
            raise BadWord("A member's word has other values than this release knows; run the same release on both.")
        return cls(version=version, order=order, **{key: body[key][:4096] for key in texts})
