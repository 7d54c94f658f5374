"""`mailboat quantise`: a BF16 checkpoint in a smaller served format."""

from __future__ import annotations

from pathlib import Path

import click

from mailboat.commands.paths import PATH
from mailboat.quantise import FORMATS


@click.command("quantise")
@click.argument("source", metavar="SRC", type=PATH)
@click.option("-o", "--output", "out", type=PATH, required=True, help="The folder to write.")
@click.option("--format", "format_", type=click.Choice(FORMATS), required=True, help="What the linear weights become.")
def command(source: Path, out: Path, format_: str) -> None:
    """Write SRC with its linear weights quantised, for engines to load.

    SRC is a .safetensors file or a checkpoint folder in BF16, F16 or F32, with or without config.json. Embeddings,
    norms and heads stay as they are. The same weights give the same bytes on every machine, so two results differ in
    little more than their weights did: publish them like any other checkpoint.
    """
    from dataclasses import replace

    from mailboat.checkpoint.files import Checkpoint, Layout
    from mailboat.checkpoint.writing import write_checkpoint
    from mailboat.quantise.source import QuantisedSource

    with Checkpoint.open(source) as checkpoint:
        quantised = QuantisedSource(checkpoint, format_)
        layout = Layout.canonical(quantised.inventory, is_folder=True)
        # Named as its origin, SRC is never written over.
        write_checkpoint(quantised, out, layout=replace(layout, origin=checkpoint.path))
        before, after = checkpoint.inventory.full_bytes, quantised.inventory.full_bytes
    click.echo(f"{len(quantised.scheme.weights)} weights as {format_}: {after:,} of {before:,} bytes")
