"""The catalogue of problem codes is complete and true."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
BASES = {"conflict", "invalid"}  # of classes whose users always say more


def used() -> set[str]:
    found: set[str] = set()
    for path in (CHECKOUT / "controlplane").rglob("*.py"):
        found |= set(re.findall(r"\bcode ?= ?\"([a-z_]+)\"", path.read_text()))
    return found - BASES


def listed() -> set[str]:
    rows = (CHECKOUT / "docs/api/problems.md").read_text().splitlines()
    return {code for row in rows if row.startswith("| ") for code in re.findall(r"`([a-z_]+)`", row.split("|")[2])}


def test_every_code_stands_in_the_catalogue() -> None:
    assert used() - listed() == set()


def test_the_catalogue_names_no_code_that_nothing_uses() -> None:
    sources = "\n".join(
        path.read_text() for place in ("controlplane", "mailboat") for path in (CHECKOUT / place).rglob("*.py")
    )
    assert {code for code in listed() if f'"{code}"' not in sources} == set()
