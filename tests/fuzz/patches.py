"""The fuzz target of patch files, for atheris; `scripts/fuzz` starts it.

A finding (another exception than a MailboatError, a hang, too much memory) is left in a file named crash-*, timeout-*
or oom-* in the working directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mailboat.patch", "mailboat.checkpoint", "mailboat.canonical"]):
    from tests.fuzz.mutation import mutated
    from tests.fuzz.subject import HOSTILE, Subject


def main() -> None:
    """Arguments: the corpus folder, then those of libFuzzer."""
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder))
        for number, case in enumerate(subject.cases):
            (corpus / f"vector-{number}").write_bytes(bytes([number]) + case.patch)
        for path in HOSTILE.glob("*.bin"):
            (corpus / path.name).write_bytes(path.read_bytes())
        atheris.Setup(sys.argv, subject.decode, custom_mutator=_mutate)
        atheris.Fuzz()


def _mutate(data: bytes, max_size: int, seed: int) -> bytes:
    return mutated(data, max_size, seed, atheris.Mutate)


if __name__ == "__main__":
    main()
