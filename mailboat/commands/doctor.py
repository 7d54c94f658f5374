"""`mailboat doctor`: what keeps an island or a trainer from working, and what to do."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("doctor")
@click.option("--server", envvar="MAILBOAT_SERVER", metavar="URL", help="Address of the control plane.")
@click.option("--project", envvar="MAILBOAT_PROJECT", help="Project that the token belongs to.")
@click.option("--token", envvar="MAILBOAT_TOKEN", help="Token to try.")
@click.option("--run", help="Run to be followed or published: its size decides how much room is needed.")
@click.option(
    "--store", type=click.Path(path_type=Path, file_okay=False), help="An island's store, or where to put it."
)
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities (PEM) of the server."
)
def command(
    *,
    server: str | None,
    project: str | None,
    token: str | None,
    run: str | None,
    store: Path | None,
    ca_file: str | None,
) -> int:
    """Look at server, token, clocks, disk, memory and compiled code; say what is wrong and what to do.

    Without --server only this machine is looked at. Exit status 1 when something has to be mended.
    """
    from mailboat.client import Api
    from mailboat.diagnosis import FAIL, Patient, examine

    api = Api(server, project or "none", token, ca_file=ca_file, timeout=10.0, attempts=1) if server else None
    bad = False
    for finding in examine(Patient(api, run, store)):
        bad |= finding.level == FAIL
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        click.echo(f"{click.style(f'{finding.level:<4}', fg=colour)}  {finding.what:<9}  {finding.sentence}")
    return int(bad)
