"""Real text that every machine with Python holds: the docstrings of its standard library.

A pair is a docstring's first line (the query) and its remaining text (the passage that answers it): what an encoder
is usually fine-tuned on.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PASSAGE_CHARACTERS = 600
SHORTEST_PASSAGE = 80


def pairs(limit: int = 4096) -> list[tuple[str, str]]:
    """At most `limit` (query, passage) pairs, in the same order on every machine with the same Python."""
    found: list[tuple[str, str]] = []
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for docstring in _docstrings(source):
            query, _, passage = docstring.partition("\n\n")
            passage = " ".join(passage.split())[:PASSAGE_CHARACTERS]
            if len(passage) >= SHORTEST_PASSAGE:
                found.append((" ".join(query.split()), passage))
                if len(found) == limit:
                    return found
    return found


def _docstrings(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
