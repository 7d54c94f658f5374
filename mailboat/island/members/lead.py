"""Puts the leader's side together: who is expected, where they knock, and the secret that both sides share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mailboat.durable import write_durably
from mailboat.errors import MailboatError
from mailboat.island.members.roster import Alone, Members, Roster
from mailboat.island.stop import Stop
from mailboat.island.store import Store

if TYPE_CHECKING:
    from mailboat.island.members.door import Door

Say = Callable[[str], None]
SHORTEST_SECRET = 32  # characters


class MembersError(MailboatError):
    """Options about members that do not go together."""

    code = "members"


@dataclass(frozen=True)
class LeadOptions:
    """The ``names`` of the members, where they find the leader, the shared secret, PEM files of certificate and key."""

    names: tuple[str, ...] = ()
    listen: str = ""
    secret: str = ""
    tls: tuple[str, str] | None = None


class Lead:
    """The members of an island and the door that they use; for an island of one host, nothing."""

    def __init__(self, options: LeadOptions, store: Store, *, image: str | None, stop: Stop, say: Say) -> None:
        self.members: Members = Alone()
        self._door: Door | None = None
        if not options.names:
            return
        try:
            from mailboat.island.members.door import Door, Tls
        except ImportError as error:
            raise MembersError(f"Members need more packages ({error.name}): pip install 'mailboat[sidecar]'") from None
        roster = self.members = Roster(options.names, store, image=image, check=stop.check)
        self._door = Door(options.listen, options.secret, roster, store, Tls(*options.tls) if options.tls else None)
        say(f"members {', '.join(options.names)} are expected at {self._door.url}")

    def close(self) -> None:
        """Closes the door."""
        if self._door is not None:
            self._door.close()


def shared_secret(path: Path, *, make: bool) -> str:
    """The secret in a file; the leader makes one where there is none. Raises MembersError."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        if not make:
            raise MembersError(f"{path} is not there; copy the leader's secret file to this host.") from None
        text = secrets.token_hex(32)
        write_durably(path, f"{text}\n".encode(), mode=0o600)
    except (OSError, UnicodeDecodeError) as error:
        raise MembersError(f"The secret file {path} can't be read ({error}).") from None
    if len(text) < SHORTEST_SECRET:
        raise MembersError(f"The secret in {path} is shorter than {SHORTEST_SECRET} characters; use a random one.")
    if path.stat().st_mode & 0o007:
        raise MembersError(f"Everybody may read the secret file {path}; chmod it to 600.")
    return text
