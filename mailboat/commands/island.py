"""`mailboat island`: run an island."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group("island")
def command() -> None:
    """Run an island: it follows a channel, rebuilds every version bit for bit and proves it."""


@command.command("run")
@click.option("--server", required=True, envvar="MAILBOAT_SERVER", metavar="URL", help="Address of the control plane.")
@click.option("--project", required=True, envvar="MAILBOAT_PROJECT", help="Project that the island belongs to.")
@click.option("--token", envvar="MAILBOAT_TOKEN", help="One-time enrolment token; needed at the first start only.")
@click.option(
    "--store", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for base, log, marker."
)
@click.option(
    "--image", type=click.Path(path_type=Path, file_okay=False), help="Folder of the image [default: shared memory]."
)
@click.option(
    "--base", type=click.Path(path_type=Path, exists=True), help="Checkpoint on this host to start from; never written."
)
@click.option(
    "--export", type=click.Path(path_type=Path, file_okay=False), help="Folder for readable copies of each version."
)
@click.option(
    "--engine",
    type=click.Choice(["checkpoint", "local", "vllm", "sglang"]),
    default="checkpoint",
    show_default=True,
    help="What serves.",
)
@click.option(
    "--engine-url", "engine_urls", multiple=True, metavar="URL", help="Address of an engine; may be repeated."
)
@click.option("--listen", metavar="HOST:PORT", help="Where the sidecar answers requests.")
@click.option(
    "--commit-mode",
    type=click.Choice(["in_place", "drain"]),
    default="in_place",
    show_default=True,
    help="Whether running requests stay in the engine through a commit, or end first.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="How long a commit waits for requests that must end first.",
)
@click.option(
    "--queue-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="How long a request waits for a commit before it gets 503.",
)
@click.option(
    "--queue-requests", type=click.IntRange(min=0), default=1024, show_default=True, help="How many requests may wait."
)
@click.option("--once", is_flag=True, help="Exit after the first catch-up.")
@click.option("--link-mbit", type=click.FloatRange(min=0, min_open=True), help="Emulate a link of so many Mbit/s.")
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities (PEM) of the server."
)
def run(
    *,
    server: str,
    project: str,
    token: str | None,
    store: Path,
    image: Path | None,
    base: Path | None,
    export: Path | None,
    engine: str,
    engine_urls: tuple[str, ...],
    listen: str | None,
    commit_mode: str,
    drain_seconds: float,
    queue_seconds: float,
    queue_requests: int,
    once: bool,
    link_mbit: float | None,
    ca_file: str | None,
) -> None:
    """Follow the channel that the enrolment token names, until stopped.

    Everything durable lies in --store. The island may be killed at any moment: the next start finishes or repeats what
    was under way and needs no token.
    """
    from mailboat.island.sidecar.assembly import EngineOptions
    from mailboat.island.sidecar.types import CommitMode, Limits
    from mailboat.island.stop import Stop
    from mailboat.island.sync import IslandOptions, run_island

    def say(line: str) -> None:
        click.echo(line, err=True)
        sys.stderr.flush()

    stop = Stop()
    stop.on_signals()
    limits = Limits(queued=queue_requests, wait=queue_seconds, drain=drain_seconds)
    serving = EngineOptions(engine, engine_urls, listen, CommitMode(commit_mode), limits)
    options = IslandOptions(
        server=server, project=project, store=store, token=token, image=image, base=base, export=export, once=once,
        link_mbit=link_mbit, ca_file=ca_file, serving=serving,
    )  # fmt: skip
    run_island(options, stop=stop, say=say)
