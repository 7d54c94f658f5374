"""The `mailboat` command: a thin, lazy front.

Each command lives in `mailboat/commands/` and is imported only when it is called, so that `mailboat --help` stays
quick. Exit status: 0 success, 2 wrong usage, 1 anything else with one sentence on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from mailboat import __version__
from mailboat.errors import MailboatError

# name -> one line for `mailboat --help`; the command is `command` in mailboat/commands/<name>.py.
_COMMANDS = {
    "digest": "Print the state digest of a checkpoint.",
    "patch": "Build, apply and inspect patches.",
    "quantise": "Write a checkpoint in a smaller served format (FP8, NVFP4, MXFP4, INT4).",
    "publish": "Publish a checkpoint as the next version of a run.",
    "island": "Run an island that follows a channel.",
    "keys": "Make, register and revoke publishers' keys.",
    "plan": "Print the route to a version: steps, bytes, seconds.",
    "status": "Print the fleet: who holds which version.",
    "doctor": "Look for what keeps an island or a trainer from working.",
}


class _LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"mailboat.commands.{cmd_name}").command
        assert isinstance(command, click.Command)  # noqa: S101 - a defect of ours, not bad input
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mailboat")
def cli() -> None:
    """Carry model weights from one trainer to rollout islands, bit for bit.

    A PATH is a .safetensors file or a checkpoint folder.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    try:
        status = cli.main(args=arguments, prog_name="mailboat", standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except MailboatError as problem:
        _fail(str(problem))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        _fail(f"{where}{problem.strerror or problem}.")
    sys.exit(status if isinstance(status, int) else 0)


def _fail(sentence: str) -> None:
    click.echo(f"mailboat: {sentence}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
