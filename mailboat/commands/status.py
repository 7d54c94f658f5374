"""`mailboat status`: the fleet on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click


@click.command("status")
@click.option("--server", required=True, envvar="MAILBOAT_SERVER", metavar="URL", help="Address of the control plane.")
@click.option("--project", required=True, envvar="MAILBOAT_PROJECT", help="Project to look at.")
@click.option(
    "--token", required=True, envvar="MAILBOAT_TOKEN", help="A token that may read: viewer, operator, publisher."
)
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer.")
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities (PEM) of the server."
)
def command(*, server: str, project: str, token: str, as_json: bool, ca_file: str | None) -> None:
    """Print heads and islands: health, sync, version, how far behind, and why."""
    from mailboat.client import Api

    fleet = Api(server, project, token, ca_file=ca_file).fleet()
    if as_json:
        click.echo(json.dumps(fleet, indent=2))
        return
    for run, head in sorted((fleet.get("head") or {}).items()):
        version = "nothing yet" if head.get("version") is None else f"version {head['version']}"
        click.echo(f"{run}/{head.get('name', 'latest')}: {version}")
    rows = [_row(island) for island in fleet.get("islands", [])]
    if not rows:
        click.echo("There are no islands.")
        return
    for line in table(("island", "health", "sync", "version", "behind", "seen", "why"), rows):
        click.echo(line)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their longest entry; the last is as long as it likes."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in [head, *rows]
    ]


def _row(island: Mapping[str, Any]) -> tuple[str, ...]:
    health, sync, skew = island["health"], island["sync"], island.get("skew") or {}
    behind = "" if not skew.get("versions") else f"{skew['versions']} ({_age(skew.get('seconds'))})"
    why = health["reason"] if health["state"] != "healthy" else sync["reason"] if sync["state"] != "current" else ""
    version = "-" if island.get("version") is None else str(island["version"])
    return island["name"], health["state"], sync["state"], version, behind, _seen(island.get("last_seen_at")), why


def _seen(text: str | None) -> str:
    from datetime import UTC, datetime

    if not text:
        return "never"
    return _age((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds())


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
