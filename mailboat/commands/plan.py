"""`mailboat plan`: the route to a version, with bytes and seconds, before anybody takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click


@click.command("plan")
@click.argument("run")
@click.option("--server", required=True, envvar="MAILBOAT_SERVER", metavar="URL", help="Address of the control plane.")
@click.option("--project", required=True, envvar="MAILBOAT_PROJECT", help="Project of the run.")
@click.option(
    "--token", required=True, envvar="MAILBOAT_TOKEN", help="A token that may read: viewer, operator, publisher."
)
@click.option("--from", "digest", metavar="DIGEST", help="State digest that is held; without it nothing is.")
@click.option("--from-version", type=click.IntRange(0), help="The same by a version's number.")
@click.option("--to", type=click.IntRange(0), help="Version to go to [default: the newest ready one].")
@click.option("--link-mbit", type=click.FloatRange(0.001), help="Speed of the link in Mbit/s.")
@click.option("--cores", type=click.IntRange(1, 1 << 16), help="Processor cores of the island.")
@click.option("--codecs", help="What it can decode, separated by commas [default: everything].")
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer.")
@click.option(
    "--ca-file", envvar="MAILBOAT_CA_FILE", type=click.Path(), help="Certificate authorities (PEM) of the server."
)
def command(
    *,
    run: str,
    server: str,
    project: str,
    token: str,
    digest: str | None,
    from_version: int | None,
    to: int | None,
    link_mbit: float | None,
    cores: int | None,
    codecs: str | None,
    as_json: bool,
    ca_file: str | None,
) -> None:
    """Print the route to a version of RUN that is servable soonest: each step's bytes and seconds, and in sum."""
    from mailboat.client import Api
    from mailboat.errors import MailboatError

    readable = None if codecs is None else _known(codecs)
    if digest and from_version is not None:
        raise click.UsageError("Give either --from or --from-version.")
    api = Api(server, project, token, ca_file=ca_file)
    if from_version is not None:
        digest = api.version(run, from_version).state_digest
        if digest is None:
            raise MailboatError(f"Version {from_version} has no state yet; name another one.")
    link = None if link_mbit is None else max(1, round(link_mbit * 1e6 / 8))
    asked = {"from_digest": digest, "to": to, "link": link, "cores": cores, "codecs": readable}
    plan = api.show_plan(run, **{name: value for name, value in asked.items() if value is not None})
    if as_json:
        click.echo(json.dumps(plan, indent=2))
        return
    held = f"version {from_version}" if from_version is not None else digest and f"state {digest[:16]}"
    for line in _lines(plan, held):
        click.echo(line)


def _known(codecs: str) -> str:
    """The codecs as the API takes them. Raises UsageError for one that nobody knows: the control plane would take it
    for one of another release.
    """
    from mailboat.errors import listed
    from mailboat.patch.format import KNOWN_CODECS

    names = [name.strip() for name in codecs.split(",")]
    if unknown := [repr(name) for name in names if name not in KNOWN_CODECS]:
        raise click.UsageError(f"--codecs has unknown names: {listed(unknown)}; known are {', '.join(KNOWN_CODECS)}.")
    return ",".join(names)


def _lines(plan: Mapping[str, Any], held: str | None) -> list[str]:
    from mailboat.commands.status import table
    from mailboat.sizes import size

    begins = held or "nothing" if plan["from"] is None else f"version {plan['from']}"
    if not plan["steps"]:
        return [f"{begins} is where the route ends: nothing to do"]
    rows: list[tuple[str, ...]] = []
    for step in plan["steps"]:
        if step["kind"] == "anchor":
            what, where = "anchor", f"version {step['version']}"
        else:
            what, where = f"{step['via']} patch", f"{step['from']} to {step['to']}"
        rows.append((what, where, size(step["bytes"]), f"{step['seconds']:.2f} s"))
    first = plan["steps"][0]
    by = f" by the anchor of version {first['version']}" if held and first["kind"] == "anchor" else ""
    lines = [f"from {begins} to version {plan['to']}{by}", *table(("step", "versions", "bytes", "time"), rows)]
    lines.append(f"in sum {size(plan['bytes'])}, {plan['seconds']:.2f} s")
    building = plan.get("building")
    if building is not None:
        doing = "would be there sooner by" if building["job"] is None else "waits for"
        about, seconds = size(building["bytes"]), building["seconds"]
        span = f"{building['from']} to {building['to']}"
        lines.append(f"an island {doing} a merged patch {span}: about {about}, {seconds:.2f} s with its building")
    return lines
