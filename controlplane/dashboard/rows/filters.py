"""What the address of the fleet page asks for: facets, limits, words to look for, order and page. Everything lives in
the address, so that a view can be shared; what it doesn't know, it ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.http import QueryDict

from controlplane.fleet.outline import Standing

PAGE = 100
UNSEEN = {"1m": timedelta(minutes=1), "10m": timedelta(minutes=10), "1h": timedelta(hours=1), "1d": timedelta(days=1)}
UNSEEN_WORDS = {"1m": "1 minute", "10m": "10 minutes", "1h": "1 hour", "1d": "1 day"}

_HEALTH = {"lost": 0, "degraded": 1, "draining": 2, "disabled": 3, "healthy": 4}
_SYNC = {"unknown": 0, "behind": 1, "ahead": 2, "pinned": 3, "current": 4}

Key = Callable[[Standing], Any]
# What is unknown sorts last when ascending: after every version, skew and size.
SORTS: dict[str, Key] = {
    "name": lambda row: row.island.name,
    "where": lambda row: (row.island.provider, row.island.region, row.island.name),
    "health": lambda row: (_HEALTH.get(row.health, 9), row.island.name),
    "sync": lambda row: (_SYNC.get(row.sync, 9), row.island.name),
    "version": lambda row: (row.version is None, row.version),
    "skew": lambda row: (row.skew_versions is None, row.skew_versions, row.skew_seconds),
    "patch": lambda row: (row.island.last_patch_bytes is None, row.island.last_patch_bytes),
    "pause": lambda row: (row.island.last_pause is None, row.island.last_pause),
    "seen": lambda row: (row.island.last_seen_at is None, row.island.last_seen_at),
}


@dataclass(frozen=True, slots=True)
class Filters:
    """Empty means anything. `behind`: more than so many versions; `unseen`: a key of UNSEEN; `q`: name, id, host or
    digest.
    """

    health: str = ""
    sync: str = ""
    run: str = ""
    provider: str = ""
    region: str = ""
    version: str = ""
    behind: str = ""
    unseen: str = ""
    q: str = ""
    sort: str = ""
    page: str = ""

    @classmethod
    def of(cls, query: QueryDict) -> Filters:
        """Read the address."""
        found = cls(**{field.name: query.get(field.name, "").strip() for field in fields(cls)})
        return replace(
            found,
            version=_whole(found.version.removeprefix("v")),
            behind=_whole(found.behind),
            unseen=found.unseen if found.unseen in UNSEEN else "",
            sort=found.sort if found.sort.removeprefix("-") in SORTS else "",
            page=_whole(found.page),
        )

    @property
    def any(self) -> bool:
        """True when some islands are left out."""
        return any(getattr(self, field.name) for field in fields(self) if field.name not in ("sort", "page"))

    def query(self, **changes: str) -> str:
        """An address with these filters, some of them changed; it begins at the first page."""
        wanted = {field.name: getattr(self, field.name) for field in fields(self)} | {"page": ""} | changes
        return "?" + urlencode({name: value for name, value in wanted.items() if value})

    def kept(self, *but: str) -> list[tuple[str, str]]:
        """What a form has to carry along as hidden fields."""
        names = [field.name for field in fields(self) if field.name not in (*but, "page")]
        return [(name, getattr(self, name)) for name in names if getattr(self, name)]

    def of_them(self, rows: Sequence[Standing], now: datetime) -> list[Standing]:
        """The islands that are asked for."""
        return [row for row in rows if self._asks_for(row, now)] if self.any else list(rows)

    def _asks_for(self, row: Standing, now: datetime) -> bool:
        island = row.island
        pairs = (
            (self.health, row.health),
            (self.sync, row.sync),
            (self.run, island.run_name),
            (self.provider, island.provider),
            (self.region, island.region),
        )
        return (
            all(not wanted or wanted == found for wanted, found in pairs)
            and (not self.version or row.version == int(self.version))
            and (not self.behind or (row.skew_versions or 0) > int(self.behind))
            and (not self.unseen or island.last_seen_at is None or now - island.last_seen_at > UNSEEN[self.unseen])
            and (not self.q or _found(self.q.lower(), row))
        )

    def ordered(self, rows: Sequence[Standing]) -> list[Standing]:
        """In the order that the address asks for; by name otherwise. Equals stay in the order of their names."""
        if not self.sort:
            return list(rows)
        return sorted(rows, key=SORTS[self.sort.removeprefix("-")], reverse=self.sort.startswith("-"))

    def by(self, name: str) -> str:
        """The address that sorts by this column, and by its reverse the second time."""
        return self.query(sort=f"-{name}" if self.sort == name else name)

    def direction(self, name: str) -> str:
        """The value of aria-sort of a column."""
        if self.sort.removeprefix("-") != name:
            return ""
        return "descending" if self.sort.startswith("-") else "ascending"


def _whole(text: str) -> str:
    return str(int(text)) if text.isascii() and text.isdigit() and len(text) < 16 else ""


def _found(wanted: str, row: Standing) -> bool:
    island = row.island
    return (
        wanted in island.name.lower()
        or wanted in island.hostname.lower()
        or island.id.hex.startswith(wanted.replace("-", ""))
        or (len(wanted) > 3 and island.digest.startswith(wanted))
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """Which part of a long table is shown, and where its neighbours are."""

    first: int
    last: int
    total: int
    number: int
    count: int
    newer: str
    older: str


def pages(chosen: Filters, total: int) -> Pages:
    """The page that the address asks for; the last one when it asks for more."""
    count = max(1, -(-total // PAGE))
    number = min(max(1, int(chosen.page or 1)), count)
    return Pages(
        first=min(total, (number - 1) * PAGE + 1),
        last=min(total, number * PAGE),
        total=total,
        number=number,
        count=count,
        newer=chosen.query(page=str(number - 1)) if number > 1 else "",
        older=chosen.query(page=str(number + 1)) if number < count else "",
    )
