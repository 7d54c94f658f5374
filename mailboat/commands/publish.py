"""`mailboat publish`: a checkpoint becomes the next version of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("publish")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--server", required=True, envvar="MAILBOAT_SERVER", metavar="URL", help="Address of the control plane.")
@click.option("--project", required=True, envvar="MAILBOAT_PROJECT", help="Project of the run.")
@click.option("--run", required=True, help="Run to publish to; made when it does not exist.")
@click.option("--token", required=True, envvar="MAILBOAT_TOKEN", help="Token with the role publisher.")
@click.option("--step", type=click.IntRange(min=0), help="The trainer's own step count.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when the version is ready.")
@click.option("--on-server", is_flag=True, help="Let a worker of the server read PATH, which it must be allowed to.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep the last version's bytes here."
)
@click.option(
    "--signing-key",
    envvar="MAILBOAT_SIGNING_KEY",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Private key that signs the version; see `mailboat keys`.",
)
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities of the server (PEM)."
)
def command(
    path: Path,
    *,
    server: str,
    project: str,
    run: str,
    token: str,
    step: int | None,
    wait: bool,
    on_server: bool,
    state_dir: Path | None,
    signing_key: Path | None,
    ca_file: str | None,
) -> None:
    """Publish the checkpoint PATH as the next version of a run.

    The patch against the last ready version is made here and uploaded. Without --state-dir that version is fetched
    first. Prints one line: number, state digest, patch bytes of full bytes.
    """
    from mailboat.trainer.publisher import Publisher, publish_on_server

    if on_server:
        info = publish_on_server(server, project, run, token, path, step=step, wait=wait, ca_file=ca_file)
        click.echo(f"{info.number} {info.state_digest or '-'} {info.state}")
        return
    with Publisher(
        server, project, run, token, state_dir=state_dir, signing_key=signing_key, ca_file=ca_file
    ) as publisher:
        version = publisher.publish_checkpoint(path, step=step, wait=wait)
    size = "anchor" if version.patch_bytes is None else f"{version.patch_bytes} bytes"
    click.echo(f"{version.number} {version.digest} {size} of {version.full_bytes}")
