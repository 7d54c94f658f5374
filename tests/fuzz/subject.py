"""What is fuzzed: a patch file is opened, inspected and decoded against a small base; only typed errors may come out.

An input is one byte, which base, and then the file. Accepted patches are decoded again by the plain decoder, and both
have to agree.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mailboat.checkpoint.source import ArraySource
from mailboat.errors import MailboatError
from mailboat.patch.decode import Decoder
from mailboat.patch.inspection import inspect
from mailboat.patch.new_bytes import NewBytes
from mailboat.patch.parts import Parts
from tests.patch.models import source, tensor_bytes
from tests.patch.reference import Part
from tests.vectors.write_patch_vectors import unpacked

VECTORS = Path(__file__).parents[1] / "vectors"
HOSTILE = VECTORS / "hostile"
_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class Case:
    """A base and a patch that starts from it."""

    base: ArraySource
    patch: bytes


def cases() -> list[Case]:
    """The committed vectors of one part and a small base, in their order."""
    found = []
    for case in json.loads((VECTORS / "patch.json").read_text())["cases"]:
        tensors = {
            row[0]: (row[1], tuple(row[2]), np.frombuffer(unpacked(row[3]), np.uint8).copy()) for row in case["tensors"]
        }
        side = {path: bytes.fromhex(data) for path, data in case["side_files"][0].items()}
        base = source(tensors, side)
        if len(case["parts"]) == 1 and base.inventory.full_bytes < _SMALL:
            found.append(Case(base, bytes.fromhex(case["parts"][0])))
    return found


class Subject:
    """Decodes inputs; `accepted` counts those that were whole patches."""

    def __init__(self, folder: Path) -> None:
        self.cases = cases()
        self._folder = folder
        self.accepted = 0

    def decode(self, data: bytes) -> bool:
        """Whether the input is accepted. Anything but a MailboatError is a finding."""
        if not data:
            return False
        case = self.cases[data[0] % len(self.cases)]
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            file.write(data[1:])
            file.flush()
            try:
                inspect([Path(file.name)], case.base.inventory)
                result = self._applied(case.base, Path(file.name))
            except MailboatError:
                return False
        self.accepted += 1
        self._agree(case.base, data[1:], result)
        return True

    def _applied(self, base: ArraySource, path: Path) -> list[bytes]:
        tensors = base.inventory.tensors
        with ExitStack() as stack:
            patch = Parts.open([path], base.inventory, stack)
            patch.side_files(base.side_files)
            new = NewBytes(len(tensors), self._folder)
            stack.callback(new.close)
            for block in Decoder(patch, base, 1).all(stack):
                size = block.nbytes // block.width
                assert block.positions.size == 0 or int(block.positions.max()) < size, "a position beyond its block"
                assert (np.diff(block.positions.astype(np.int64)) > 0).all(), "positions out of order"
                new.add(block)
            new.finish()
            result = []
            for index, tensor in enumerate(tensors):
                out = np.empty(tensor.nbytes, np.uint8)
                base.read(index, 0, out)
                new.lay_over(index, 0, out)
                result.append(out.tobytes())
            return result

    def _agree(self, base: ArraySource, raw: bytes, result: list[bytes]) -> None:
        held = tensor_bytes(base)
        plain = Part(raw).apply(held)
        assert [plain.get(index, old) for index, (_, old) in enumerate(held)] == result, "the plain decoder differs"
