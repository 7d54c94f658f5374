"""What a checkpoint folder holds: which files are its shards, its index and its side files.

Nothing is guessed: several tensor files without an index, or an index beside a model that it doesn't name, are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mailboat import canonical
from mailboat.checkpoint.side_files import (
    INDEX_FILE,
    MAX_SIDE_BYTES,
    MAX_SIDE_FILES,
    TENSOR_FILE,
    SideFile,
    is_side_name,
    path_problem,
)
from mailboat.errors import CheckpointChanged, CheckpointError

SINGLE = "model.safetensors"
_MAX_INDEX = 100_000_000
_MAX_DEPTH = 16
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a sharded checkpoint: file name, exact bytes, and {tensor name: shard}."""

    name: str
    raw: bytes
    weight_map: dict[str, str]

    @property
    def shards(self) -> list[str]:
        """The shards that it names, sorted."""
        return sorted(set(self.weight_map.values()))


def find_shards(folder: Path) -> tuple[list[str], Index | None]:
    """Return the names of the tensor files of a folder and its index; raise CheckpointError when that isn't clear."""
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    files = [name for name in names if name.endswith(TENSOR_FILE)]
    indices = [name for name in names if name.endswith(INDEX_FILE)]
    if len(indices) > 1:
        raise CheckpointError(f"{folder} holds several indices ({', '.join(indices[:5])}); keep the one that is meant.")
    if indices:
        index = _read_index(folder, indices[0])
        if SINGLE in files and SINGLE not in index.shards:
            raise CheckpointError(f"{folder} holds {SINGLE} and an index that does not name it; keep only one of them.")
        if missing := [name for name in index.shards if name not in files]:
            raise CheckpointError(
                f"{folder / index.name} names {missing[0]}, which is not there; fetch the missing shards."
            )
        return index.shards, index
    if not files:
        raise CheckpointError(f"{folder} holds no {TENSOR_FILE} file, so it is not a checkpoint.")
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} {TENSOR_FILE} files but no index; add *{INDEX_FILE}.")
    return files, None


def _read_index(folder: Path, name: str) -> Index:
    path = folder / name
    raw = read_bounded(path, _MAX_INDEX)
    try:
        if canonical.depth(raw) > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        parsed = json.loads(raw.decode(), object_pairs_hook=canonical.unique_pairs)
        weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no weight_map")
        for shard in weight_map.values():
            _check_shard_name(shard)
    except (ValueError, RecursionError) as problem:
        reason = str(problem).splitlines()[0][:200]
        raise CheckpointError(f"The index {path} is not valid: {reason}; fetch or write it again.") from None
    return Index(name, raw, weight_map)


def _check_shard_name(shard: Any) -> None:
    if not isinstance(shard, str) or not shard.endswith(TENSOR_FILE):
        raise ValueError("a shard is not the name of a .safetensors file")
    shard.encode()
    if "/" in shard or "\0" in shard or shard.startswith("."):
        raise ValueError(f"the shard {shard[:80]!r} does not lie beside the index")


def read_bounded(path: Path, limit: int) -> bytes:
    """Return a file's bytes; raise CheckpointError when there are more than `limit`."""
    chunks, size = [], 0  # asked for at once, Python would make room for the limit
    with path.open("rb") as file:
        while size <= limit and (chunk := file.read(_CHUNK)):
            chunks.append(chunk)
            size += len(chunk)
    if size > limit:
        raise CheckpointError(f"{path} is larger than the {limit >> 20} MiB allowed; move it out of the checkpoint.")
    return b"".join(chunks)


def side_paths(folder: Path) -> list[str]:
    """Return the relative POSIX paths of a folder's side files, sorted.

    Symlinked files are followed, as a Hugging Face cache needs; a symlinked folder or a broken link raises
    CheckpointError.
    """
    found: list[str] = []
    pending = [""]
    while pending:
        inside = pending.pop()
        for entry in os.scandir(folder / inside):
            if not entry.name.startswith("."):
                _sort_entry(folder, inside + entry.name, entry, found, pending)
        if len(found) > MAX_SIDE_FILES:
            raise CheckpointError(f"{folder} holds more than {MAX_SIDE_FILES} files; is it a checkpoint?")
    for path in found:
        if problem := path_problem(path):
            raise CheckpointError(
                f"The side file {path!a} of {folder} can't be carried: its name {problem}; rename it."
            )
    return sorted(found)


def _sort_entry(folder: Path, path: str, entry: os.DirEntry[str], found: list[str], pending: list[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        pending.append(path + "/")
    elif entry.is_dir():
        raise CheckpointError(f"{folder / path} is a link to a folder; put the files themselves into the checkpoint.")
    elif entry.is_file():
        if is_side_name(entry.name):
            found.append(path)
    elif entry.is_symlink():
        raise CheckpointError(f"{folder / path} is a link to nothing; fetch the file or remove the link.")


def hash_side_file(folder: Path, path: str) -> tuple[SideFile, os.stat_result]:
    """Read one side file and describe it, with the file status before reading; raise CheckpointError when too large."""
    with (folder / path).open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointChanged(
                f"{folder / path} changed while the checkpoint was opened; try again when it rests."
            )
        if status.st_size > MAX_SIDE_BYTES:
            raise CheckpointError(
                f"{folder / path} has {status.st_size >> 20} MiB, more than the {MAX_SIDE_BYTES >> 20} MiB allowed "
                "beside the tensors; move it out of the checkpoint."
            )
        digest, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if size > status.st_size:
                break
    if size != status.st_size:
        raise CheckpointChanged(f"{folder / path} changed while it was read; try again when it rests.")
    return SideFile(path, size, digest.hexdigest()), status
