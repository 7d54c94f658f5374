"""`mailboat patch build | apply | merge | reverse | inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mailboat.commands.paths import PATH

if TYPE_CHECKING:
    from mailboat.patch import BuiltPatch


@click.group("patch")
def command() -> None:
    """Build, apply, merge, reverse and inspect patches.

    A patch turns one state of a model into another, bit for bit. A PATH is a .safetensors file or a checkpoint folder.
    """


@command.command()
@click.argument("base", type=PATH)
@click.argument("target", type=PATH)
@click.option("-o", "--output", "out", type=PATH, required=True, help="Where to write the patch.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads to use (default: one per core). The bytes are the same."
)
@click.option(
    "--encode-for",
    type=click.Choice(["size", "speed"]),
    default="size",
    show_default=True,
    help="The smallest patch, or one that is applied without scanning BASE: for links above some 0.4 Gbit/s.",
)
def build(base: Path, target: Path, out: Path, threads: int | None, encode_for: Literal["size", "speed"]) -> None:
    """Write the patch that turns BASE into TARGET."""
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.patch.build import build_patch

    with Checkpoint.open(base) as before, Checkpoint.open(target) as after:
        built = build_patch(before, after, out, threads=threads, encode_for=encode_for)
    _report(built)


def _report(built: BuiltPatch) -> None:
    share = built.size / max(1, built.base_state.inventory.full_bytes)
    click.echo(f"from     {built.base_state.digest}")
    click.echo(f"to       {built.target_state.digest}")
    click.echo(f"changed  {built.changed:,} of {built.elements:,} elements")
    click.echo(f"size     {built.size:,} bytes ({share:.3%} of the checkpoint)")


@command.command()
@click.argument("base", type=PATH)
@click.argument("patch", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", "out", type=PATH, required=True, help="Where to write the merged patch.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads to use (default: one per core). The bytes are the same."
)
def merge(base: Path, patch: tuple[Path, ...], out: Path, threads: int | None) -> None:
    """Write the one patch that does what every PATCH does, one after the other, starting from BASE."""
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.patch.derive import merge_patches, patches_of

    with Checkpoint.open(base) as before:
        _report(merge_patches(before, patches_of(patch), out, threads=threads))


@command.command()
@click.argument("base", type=PATH)
@click.argument("patch", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", "out", type=PATH, required=True, help="Where to write the reversed patch.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads to use (default: one per core). The bytes are the same."
)
def reverse(base: Path, patch: tuple[Path, ...], out: Path, threads: int | None) -> None:
    """Write the patch that leads back to BASE from what PATCH (all its parts) makes of it."""
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.patch.derive import reverse_patch

    with Checkpoint.open(base) as before:
        _report(reverse_patch(before, patch, out, threads=threads))


@command.command()
@click.argument("base", type=PATH)
@click.argument("patch", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", "out", type=PATH, required=True, help="Where to write the result; replaced atomically.")
@click.option("--threads", type=click.IntRange(1), help="Threads to use (default: one per core).")
def apply(base: Path, patch: tuple[Path, ...], out: Path, threads: int | None) -> None:
    """Write what PATCH makes of BASE; give every part of a patch that has several.

    The result keeps BASE's shard layout and appears only once its digest is right. BASE is never written.
    """
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.patch.apply import apply_patch

    with Checkpoint.open(base) as before:
        click.echo(apply_patch(before, patch, out, threads=threads))


@command.command()
@click.argument("patch", type=PATH, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--base", type=PATH, help="The checkpoint that the patch starts from: gives the tensors' names and shapes."
)
def inspect(patch: tuple[Path, ...], as_json: bool, base: Path | None) -> None:
    """Show what PATCH contains, without applying it."""
    from mailboat.checkpoint.files import Checkpoint
    from mailboat.patch.inspection import inspect as read

    inventory = None
    if base is not None:
        with Checkpoint.open(base) as before:
            inventory = before.inventory
    found = read(patch, inventory)
    click.echo(json.dumps(found) if as_json else _text(found))


def _text(found: dict[str, Any]) -> str:
    totals = found["totals"]
    lines = [
        f"from     {found['from']}",
        f"to       {found['to']}",
        f"codecs   {', '.join(found['codecs']) or 'none'}",
        f"changed  {totals['changed']:,} of {totals['elements']:,} elements",
        f"size     {totals['bytes']:,} of {totals['full_bytes']:,} bytes ({totals['ratio']:.3%})",
    ]
    changed = [row for row in found["tensors"] if row["changed"]]
    if changed:
        lines += ["", f"{'changed':>14}  {'bytes':>12}  {'encoding':<14}  tensor"]
        lines += [f"{r['changed']:>14,}  {r['bytes']:>12,}  {r['encoding']:<14}  {r['name']}" for r in changed]
    same = len(found["tensors"]) - len(changed)
    return "\n".join([*lines, "", f"{same} of {len(found['tensors'])} tensors did not change."])
