"""`mailboat keys`: publishers' keys, from the file to the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mailboat.client import Api


def _server(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of those subcommands that ask the control plane."""
    for option in (
        click.option(
            "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Authorities (PEM) of the server."
        ),
        click.option(
            "--token",
            required=True,
            envvar="MAILBOAT_TOKEN",
            help="A token; register and revoke need an operator's or admin's.",
        ),
        click.option("--project", required=True, envvar="MAILBOAT_PROJECT", help="Project of the run."),
        click.option("--server", required=True, envvar="MAILBOAT_SERVER", metavar="URL", help="The control plane."),
    ):
        command = option(command)
    return command


def _api(server: str, project: str, token: str, ca_file: str | None) -> Api:
    from mailboat.client import Api

    return Api(server, project, token, ca_file=ca_file)


@click.group("keys")
def command() -> None:
    """Make, register and revoke the keys with which trainers sign versions.

    A KEY is a public key as 64 hex digits, or a file with either half. Private halves are never shown nor sent.
    """


@command.command("new")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def new(path: Path) -> None:
    """Make a key: the private half in PATH, for its owner alone, the public half in PATH.pub and here."""
    from mailboat.signing import write_key

    _say(write_key(path))


@command.command("show")
@click.argument("key")
def show(key: str) -> None:
    """Print the public half of KEY and its fingerprint."""
    from mailboat.signing import read_public

    _say(read_public(key))


@command.command("fingerprint")
@click.argument("key")
def fingerprint(key: str) -> None:
    """Print the fingerprint of KEY, as pages show it."""
    from mailboat.identity import fingerprint as of
    from mailboat.signing import read_public

    click.echo(of(read_public(key)))


@command.command("register")
@click.argument("run")
@click.argument("key")
@click.option("--name", default="", help="For people; its fingerprint by default.")
@click.option(
    "--endorsed-by",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Private key that islands trust already: they will trust KEY too. May be given later, by registering again.",
)
@_server
def register(*, run: str, key: str, name: str, endorsed_by: Path | None, **connection: Any) -> None:
    """Register KEY with RUN, which from then on takes signed versions only."""
    from mailboat.signing import PUBLISHER, KeyDocument, endorse, read_key, read_public

    api, public = _api(**connection), read_public(key)
    endorsement = None
    if endorsed_by is not None:
        endorsement = endorse(KeyDocument(PUBLISHER, api.run(run).id, public), read_key(endorsed_by))
    row = api.register_key(run, public, name, endorsement)
    click.echo(f"{row['id']} {row['name']} {row['fingerprint']}")


@command.command("list")
@click.argument("run")
@_server
def list_(*, run: str, **connection: Any) -> None:
    """Print the keys of RUN, newest first."""
    from mailboat.commands.status import table

    head = ("id", "name", "public key", "fingerprint", "state")
    found = _api(**connection).keys(run)
    rows = [tuple(str(row[key]) for key in ("id", "name", "public_key", "fingerprint")) for row in found]
    rows = [(*row, _state(key)) for row, key in zip(rows, found, strict=True)]
    for line in table(head, rows) if rows else [f"{run} has no keys: it takes unsigned versions."]:
        click.echo(line)


@command.command("revoke")
@click.argument("run")
@click.argument("key")
@click.option("--reason", required=True, help="For the audit log and whoever meets the key again.")
@_server
def revoke(*, run: str, key: str, reason: str, **connection: Any) -> None:
    """Revoke KEY (its id, or the key) for good: neither RUN nor its islands take its signature any more.

    What it signed before counts no more either, since nobody can tell it from a forgery: islands pass by such versions
    on their way to one that another key has signed, but start from none. Have an anchor made of the first version that
    another key signs, or islands that start afresh have nowhere to start from.
    """
    from mailboat.signing import read_public

    api = _api(**connection)
    found = {row["id"]: row for row in api.keys(run)}
    chosen = found.get(key) or next((row for row in found.values() if row["public_key"] == read_public(key)), None)
    if chosen is None:
        raise click.ClickException(f"{run} has no such key; `mailboat keys list {run}` shows them.")
    row = api.revoke_key(run, str(chosen["id"]), reason)
    click.echo(f"{row['id']} {row['name']} {_state(row)}")


@command.command("head-keys")
@click.argument("run")
@_server
def head_keys(*, run: str, **connection: Any) -> None:
    """Print the public keys that sign the heads of RUN, as the control plane says."""
    for public in _api(**connection).trust(run).heads:
        _say(public)


def _state(row: Any) -> str:
    return "in use" if row["revoked_at"] is None else f"revoked: {row['revoked_reason']}"


def _say(public: str) -> None:
    from mailboat.identity import fingerprint as of

    click.echo(f"{public} {of(public)}")
