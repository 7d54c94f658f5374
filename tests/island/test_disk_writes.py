"""What an island writes to its disk: with the image in memory, and outside compaction, about the patch and no more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mailboat.durable import remove
from tests.island.contract_server import PROJECT, ContractServer
from tests.island.fleet import Trainer
from tests.waiting import PATIENCE, eventually

VERSIONS = 5
# Beside the parts: manifest, digests, marker, intent, serial and report, each in blocks of 4 KiB.
NOTES = 128 << 10


def written(pid: int) -> int:
    """Bytes that a process has caused to be written to disks."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


@pytest.fixture
def counted(tmp_path: Path) -> None:
    """Leaves where the system does not count (a tmpfs, say)."""
    before = written(os.getpid())
    with (tmp_path / "probe").open("wb") as file:
        file.write(b"x" * (1 << 20))
        os.fsync(file.fileno())
    if written(os.getpid()) - before < 1 << 20:
        pytest.skip("writes to this folder are not counted")


def test_writes_per_version_are_proportional_to_the_patch(
    server: ContractServer, tmp_path: Path, counted: None
) -> None:
    store = tmp_path / "store"
    command = [
        sys.executable, "-m", "mailboat.cli", "island", "run", "--server", server.address, "--project", PROJECT,
        "--store", str(store), "--token", "once",
    ]  # fmt: skip
    with Trainer(server, tmp_path, rows=100_000) as trainer, (tmp_path / "log").open("wb") as log:
        full = trainer.step(60_000).full_bytes
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "NO_PROXY": "*"})
        try:
            eventually(lambda: b"strong digests of image, base and log agree" in (tmp_path / "log").read_bytes())
            assert not (store / "image").exists(), "the image is in memory"
            patches, before = 0, written(process.pid)
            for number in range(1, VERSIONS + 1):
                version = trainer.step(60_000)
                assert version.patch_bytes is not None
                patches += version.patch_bytes
                server.wait_for(lambda n=number: server.applied(n))
            wrote = written(process.pid) - before
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
            for note in Path("/dev/shm").glob(f"mailboat-{os.getuid()}/*.store"):
                with contextlib.suppress(FileNotFoundError):  # another island's, which went meanwhile
                    if note.read_bytes() == os.fsencode(store):
                        remove(note.with_suffix(""))
                        remove(note)
    assert patches <= wrote <= 1.1 * patches + VERSIONS * NOTES, f"{wrote:,} for patches of {patches:,}"
    assert wrote < VERSIONS * full / 10, "a checkpoint written anew for each version would be ten times that"
