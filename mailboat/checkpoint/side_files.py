"""Side files: the small files that belong to a state beside its tensors, and which paths they may have.

A path from a manifest or patch becomes a file name on an island, so none may leave its folder, hide or pose as tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_SIDE_BYTES = 1 << 28
MAX_SIDE_FILES = 10_000
_MAX_PATH = 1024
_MAX_PART = 255
_HEX64 = re.compile(r"[0-9a-f]{64}")
TENSOR_FILE = ".safetensors"
INDEX_FILE = ".safetensors.index.json"


@dataclass(frozen=True, slots=True, order=True)
class SideFile:
    """A side file: POSIX path relative to the checkpoint, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that manifests list."""
        return {"path": self.path, "sha256": self.sha256, "size": self.size}


def side_file(path: str, content: bytes) -> SideFile:
    """Describe a side file by its content."""
    return SideFile(path, len(content), hashlib.sha256(content).hexdigest())


def sorted_side_files(files: Iterable[SideFile]) -> tuple[SideFile, ...]:
    """Return side files in the order of their paths (code point order is UTF-8 byte order)."""
    return tuple(sorted(files, key=lambda file: file.path))


def is_side_name(name: str) -> bool:
    """Say whether a file of this name is a side file rather than tensors, their index or hidden."""
    return not (name.startswith(".") or name.endswith((TENSOR_FILE, INDEX_FILE)))


def path_problem(path: str) -> str | None:
    """Say why `path` can't name a side file, or return None."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = path.split("/")
    if not path or len(encoded) > _MAX_PATH or any(len(part.encode()) > _MAX_PART for part in parts):
        return "is empty or too long"
    if any(part == "" or part.startswith(".") for part in parts) or "\0" in path:
        return "leaves its folder or is hidden"
    return None if is_side_name(parts[-1]) else "is a tensor file or index"


def paths_problem(paths: Sequence[str]) -> str | None:
    """Say what is wrong with the paths of one state's side files (sorted, distinct, no file inside a file), or None."""
    if len(paths) > MAX_SIDE_FILES:
        return f"there are more than {MAX_SIDE_FILES}"
    for path in paths:
        if problem := path_problem(path):
            return f"{path[:80]!r} {problem}"
    if any(before >= after for before, after in pairwise(paths)):
        return "they are not sorted, or one comes twice"
    known = set(paths)
    inside = [path for path in paths if any(path[:at] in known for at, mark in enumerate(path) if mark == "/")]
    return f"{inside[0]!r} lies inside another file" if inside else None


def parse_side_files(value: Any) -> tuple[SideFile, ...]:
    """Check a JSON list of side files and return it; raise ValueError with the reason."""
    if not isinstance(value, list):
        raise ValueError("the side files are not a list")
    files = []
    for item in value:
        if not isinstance(item, dict) or item.keys() != {"path", "sha256", "size"}:
            raise ValueError("a side file needs path, sha256 and size")
        path, sha256, size = item["path"], item["sha256"], item["size"]
        if not isinstance(path, str) or not isinstance(sha256, str) or not _HEX64.fullmatch(sha256):
            raise ValueError("a side file's path or sha256 is not valid")
        if type(size) is not int or not 0 <= size <= MAX_SIDE_BYTES:
            raise ValueError(f"the size of the side file {path[:80]!r} is not valid")
        files.append(SideFile(path, size, sha256))
    if problem := paths_problem([file.path for file in files]):
        raise ValueError(f"the side files are not valid: {problem}")
    return tuple(files)
