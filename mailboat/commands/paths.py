"""Paths as arguments: never empty, which would mean the working directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class NamedPath(click.Path):
    """A path that has to be named."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; an empty text is wrong usage."""
        if value == "":
            self.fail("the path is empty; name a file or a folder ('.' is this one).", param, ctx)
        return super().convert(value, param, ctx)


PATH = NamedPath()
