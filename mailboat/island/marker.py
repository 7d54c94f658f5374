"""The marker: the island's durable note of which base and which patches of its log make the version that it holds.

It must never name anything that is not durable yet: base and log entries come first, the marker last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mailboat.durable import write_durably
from mailboat.errors import StoreError
from mailboat.manifest import BlobRef

FORMAT = "mailboat-marker-1"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One patch of the log: ``name`` is its folder, ``version`` and ``state`` what it leads to, ``parts`` its files'
    digests.
    """

    name: str
    version: int
    epoch: int
    origin: str
    state: str
    manifest: str
    inventory: str
    digests: str
    parts: tuple[BlobRef, ...]

    def as_json(self) -> dict[str, Any]:
        """The canonical form."""
        return {
            "name": self.name,
            "version": self.version,
            "epoch": self.epoch,
            "origin": self.origin,
            "state": self.state,
            "manifest": self.manifest,
            "inventory": self.inventory,
            "digests": self.digests,
            "parts": [[part.sha256, part.size] for part in self.parts],
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> LogEntry:
        """Reads what `as_json` wrote; anything else raises KeyError, TypeError or ValueError."""
        parts = tuple(BlobRef(sha256=str(sha256), size=int(size)) for sha256, size in body["parts"])
        texts = {key: str(body[key]) for key in ("name", "origin", "state", "manifest", "inventory", "digests")}
        if "/" in texts["name"] or texts["name"] in {"", ".", ".."}:
            raise ValueError("name")
        return cls(version=int(body["version"]), epoch=int(body["epoch"]), parts=parts, **texts)


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that the log starts from: a folder of the store (relative path), or a reference (absolute)."""

    path: str
    version: int
    state: str


@dataclass(frozen=True, slots=True)
class Marker:
    """Run, epoch, version and state that base + log make, the version's documents, and the head's ``serial`` that led
    here.
    """

    run: str
    epoch: int
    version: int
    state: str
    manifest: str
    inventory: str
    digests: str
    serial: int
    base: Base
    log: tuple[LogEntry, ...]

    def as_json(self) -> dict[str, Any]:
        """The form in which it is kept and told to members."""
        return {
            "format": FORMAT,
            "run": self.run,
            "epoch": self.epoch,
            "version": self.version,
            "state": self.state,
            "manifest": self.manifest,
            "inventory": self.inventory,
            "digests": self.digests,
            "serial": self.serial,
            "base": {"path": self.base.path, "version": self.base.version, "state": self.base.state},
            "log": [entry.as_json() for entry in self.log],
        }

    def write(self, path: Path) -> None:
        """Replaces the marker durably. Raises DiskFull."""
        write_durably(path, json.dumps(self.as_json(), sort_keys=True, indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> Marker | None:
        """The marker, or None when there is none. A damaged one raises StoreError: the island then starts anew."""
        try:
            return cls.parse(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"The marker {path} is damaged ({error}); the island seeds itself again.") from error

    @classmethod
    def parse(cls, body: Any) -> Marker:
        """Reads what `as_json` wrote. Raises ValueError."""
        try:
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']}")
            base = Base(str(body["base"]["path"]), int(body["base"]["version"]), str(body["base"]["state"]))
            marker = cls(
                run=str(body["run"]),
                epoch=int(body["epoch"]),
                version=int(body["version"]),
                state=str(body["state"]),
                manifest=str(body["manifest"]),
                inventory=str(body["inventory"]),
                digests=str(body["digests"]),
                serial=int(body["serial"]),
                base=base,
                log=tuple(LogEntry.parse(entry) for entry in body["log"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from error
        # A chain with a hole can't have been written; say so instead of rebuilding something else.
        at = marker.base.state
        for entry in marker.log:
            if entry.origin != at:
                raise ValueError("its log has a hole")
            at = entry.state
        if at != marker.state:
            raise ValueError("its log ends elsewhere")
        return marker
