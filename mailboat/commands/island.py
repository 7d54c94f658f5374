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
@click.option(
    "--token",
    envvar="MAILBOAT_TOKEN",
    help="One-time enrolment token; needed at the first start, and to come back after the island was removed.",
)
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
@click.option(
    "--member", "members", multiple=True, metavar="NAME", help="Another host of this island; may be repeated."
)
@click.option("--members-listen", metavar="HOST:PORT", help="Where the members find this host.")
@click.option(
    "--members-secret",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the secret that all hosts share; made when it is not there.",
)
@click.option(
    "--members-tls",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False),
    metavar="CERTIFICATE KEY",
    help="PEM files; without them members speak plain HTTP.",
)
@click.option(
    "--publisher-key",
    "publisher_keys",
    multiple=True,
    metavar="HEX|FILE",
    envvar="MAILBOAT_PUBLISHER_KEY",
    help="Public key of a publisher: versions that none of these has signed are refused; may be repeated.",
)
@click.option(
    "--blob-url",
    metavar="URL",
    help="Blob store to follow while the server is away: file:///FOLDER, https://HOST/PATH, s3://BUCKET/PREFIX.",
)
@click.option("--once", is_flag=True, help="Exit after the first catch-up, or a few tries in vain.")
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
    members: tuple[str, ...],
    members_listen: str | None,
    members_secret: Path | None,
    members_tls: tuple[str, str] | None,
    publisher_keys: tuple[str, ...],
    blob_url: str | None,
    once: bool,
    link_mbit: float | None,
    ca_file: str | None,
) -> None:
    """Follow the channel that the enrolment token names, until stopped.

    Everything durable lies in --store. The island may be killed at any moment: the next start finishes or repeats what
    was under way and needs no token.
    """
    from mailboat.island.members.lead import LeadOptions, shared_secret
    from mailboat.island.sidecar.assembly import EngineOptions
    from mailboat.island.sidecar.types import CommitMode, Limits
    from mailboat.island.stop import Stop
    from mailboat.island.sync import IslandOptions, run_island
    from mailboat.signing import read_public

    def say(line: str) -> None:
        click.echo(line, err=True)
        sys.stderr.flush()

    lead = LeadOptions()
    if members:
        if not (members_listen and members_secret):
            raise click.UsageError("--member needs --members-listen HOST:PORT and --members-secret FILE.")
        if engine_urls and image is None:
            raise click.UsageError("--member needs --image: the engine reads the same folder on every host.")
        lead = LeadOptions(members, members_listen, shared_secret(members_secret, make=True), members_tls)
    stop = Stop()
    stop.on_signals()
    limits = Limits(queued=queue_requests, wait=queue_seconds, drain=drain_seconds)
    serving = EngineOptions(engine, engine_urls, listen, CommitMode(commit_mode), limits)
    options = IslandOptions(
        server=server, project=project, store=store, token=token, image=image, base=base, export=export, once=once,
        publisher_keys=tuple(map(read_public, publisher_keys)), link_mbit=link_mbit, ca_file=ca_file, serving=serving,
        members=lead, blob_url=blob_url,
    )  # fmt: skip
    run_island(options, stop=stop, say=say)


@command.command("member")
@click.option(
    "--leader", required=True, envvar="MAILBOAT_LEADER", metavar="URL", help="Where the leader's members find it."
)
@click.option("--name", required=True, help="This host's name, as the leader's --member has it.")
@click.option(
    "--store", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for base, log, marker."
)
@click.option(
    "--image",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the image; the leader's, for an engine.",
)
@click.option(
    "--secret",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The leader's --members-secret file.",
)
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities (PEM) of the leader."
)
def member(*, leader: str, name: str, store: Path, image: Path | None, secret: Path, ca_file: str | None) -> None:
    """Hold on this host what the leader's island holds, moving with it or not at all, until stopped.

    For engines whose workers run on several hosts: those on this one read --image. No credential and no connection
    but the one to the leader is needed. It may be killed at any moment.
    """
    from mailboat.island.members.follower import MemberOptions, run_member
    from mailboat.island.members.lead import shared_secret
    from mailboat.island.stop import Stop

    def say(line: str) -> None:
        click.echo(line, err=True)
        sys.stderr.flush()

    stop = Stop()
    stop.on_signals()
    options = MemberOptions(leader, name, shared_secret(secret, make=False), store, image, ca_file)
    run_member(options, stop=stop, say=say)
