"""The examples under docs/deploy: they parse, and every `mailboat` command in them has options that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from mailboat.commands.island import command

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
UNITS = sorted(DEPLOY.glob("mailboat-*.service"))


def check(words: list[str]) -> None:
    """`island` and what follows; raises click's errors for anything that the command does not know."""
    name, *options = words
    found = command.commands[name]  # type: ignore[attr-defined]
    known = [re.sub(r"\$\{?\w+\}?", "vllm", option) for option in options]
    required = ["--server", "http://x", "--project", "p"] if name == "run" else []
    with click.Context(found) as context:
        found.parse_args(context, [*known, *required])


def commands(body: Any) -> Iterator[list[str]]:
    """The `mailboat island` commands in a manifest."""
    if isinstance(body, dict):
        for key, value in body.items():
            if key in {"args", "command"} and isinstance(value, list) and value[0] in {"run", "member"}:
                yield value
            yield from commands(value)
    elif isinstance(body, list):
        for item in body:
            yield from commands(item)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_parse_and_their_commands_exist(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    found = [words for document in documents for words in commands(document)]
    assert found or path.name == "alerts.yaml"
    for words in found:
        check(words)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_commands_that_exist(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"^ExecStart=\S*/mailboat island (.*)$", text, re.MULTILINE):
        check(shlex.split(line))
    assert "[Install]" in text and "ExecStart=" in text
