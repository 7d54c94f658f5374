"""`mailboat digest`: one line, the state digest."""

from __future__ import annotations

from pathlib import Path

import click

from mailboat.commands.paths import PATH


@click.command("digest")
@click.argument("path", type=PATH)
def command(path: Path) -> None:
    """Print the state digest of PATH: 64 hex digits.

    It names the contents (tensors and side files) whatever the shards and their metadata. A lone .safetensors file has
    no side files, so its digest differs from that of its folder.
    """
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.digest import measure

    with Checkpoint.open(path) as checkpoint:
        click.echo(measure(checkpoint).digest)
