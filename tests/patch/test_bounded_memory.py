"""A54: the largest table that a hostile file of two kilobytes can hold is refused in the memory that is stated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mailboat.patch.container import header_bytes
from mailboat.patch.format import MAX_TABLE_BYTES
from mailboat.patch.streams import zstd

STATED = 768 << 20
CHILD = """
import sys
from mailboat.errors import PatchError
from mailboat.patch import PatchFile
from mailboat.patch.streams import zstd

def peak():  # of this program: what getrusage says begins with the size of the process that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak()
try:
    PatchFile.open(sys.argv[1])
except PatchError:
    print((peak() - before) * 1024)
"""


def column(value: int, width: int) -> bytes:
    return value.to_bytes(width, "little")


def test_a54_a_table_of_as_many_blocks_as_fit(tmp_path: Path) -> None:
    blocks = (MAX_TABLE_BYTES - 16 - 22) // 13
    table = b"".join([
        column(1, 4), bytes(12), bytes(4), column(blocks << 20, 8), column(1 << 20, 8), b"\1", b"\1",
        b"\4" * blocks, b"\1" * blocks, bytes(11 * blocks),
    ])  # fmt: skip
    packed = zstd.compress(table)
    assert len(packed) < 10_000
    metadata = {
        "changed": str(blocks), "codecs": "contextual", "elements": str(blocks << 20), "format": "mailboat-patch-1",
        "from": "0" * 64, "full_bytes": str(blocks << 20), "inventory": "0" * 64, "part": "0", "parts": "1",
        "removed": "[]", "table_bytes": str(len(table)), "tensors": "1", "to": "0" * 64, "zstd": "1.5.7",
    }  # fmt: skip
    (tmp_path / "hostile").write_bytes(header_bytes(metadata, [("table", len(packed))]) + packed)
    said = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "hostile")], capture_output=True, text=True, check=True
    ).stdout
    assert 0 < int(said) < STATED
