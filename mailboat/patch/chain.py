"""What several patches make of a base, one after the other, worked out where and when it is read.

Read from front to back, the base is gone through once: a window is decoded through all patches while it is at hand, and
only what changed in it is kept, in a file without a name. It must never hold a tensor in memory.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.errors import PatchError, WrongBase
from mailboat.patch.backends import kernels
from mailboat.patch.decode import Decoded, Decoder
from mailboat.patch.format import BLOCK_ELEMENTS, GROUP_BYTES, Geometry
from mailboat.patch.kept import Block, KeptChanges
from mailboat.patch.parts import Group, Parts
from mailboat.patch.scratch import Scratch

_LARGEST_BLOCK = 8 * BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one patch decodes at once: a coding group, or a block of another encoding."""

    step: int
    group: Group | None
    blocks: tuple[Block, ...]


class Chain:
    """A base with patches laid over it: reads as the state that the last one leads to. Made by `open`."""

    def __init__(self, base: TensorSource, patches: Sequence[Parts], folder: Path, threads: int, stack: ExitStack):
        """Use `open`."""
        self._base, self._patches = base, patches
        self._carriers = {file.path: patch for patch in patches for file in patch.carried_side_files}
        self._geometries = [Geometry.of(tensor) for tensor in base.inventory.tensors]
        self._first = list(accumulate((geometry.blocks for geometry in self._geometries), initial=0))
        self._done = [bytearray(self._first[-1]) for _ in patches]
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - the stack closes it
        self._kept = KeptChanges(file.fileno())
        self._at_hand = _AtHand(base, self._kept, self._geometries, threads)
        self._decoders = [Decoder(patch, self._at_hand, 1) for patch in patches]
        self._reading = [threading.Lock() for _ in patches]
        self._working: dict[tuple[int, Block], threading.Lock] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._ahead = _Ahead(self._windows(), self._bring_all, threads, stack)

    @classmethod
    def open(
        cls, base: TensorSource, patches: Sequence[Sequence[Path]], folder: Path, threads: int, stack: ExitStack
    ) -> Chain:
        """Open patches, each a list of its parts, that follow on each other; `folder` holds what they change.

        Whether `base` is what the first one starts from is not looked at. Raises PatchError, UnknownCodec, WrongBase.
        """
        opened = [Parts.open(parts, base.inventory, stack) for parts in patches]
        if not opened:
            raise PatchError("There is no patch to derive one from; name at least one.")
        for before, after in pairwise(opened):
            if after.from_digest != before.to_digest:
                raise WrongBase(
                    f"A patch starts from the state {after.from_digest[:16]}, but what lies before it is "
                    f"{before.to_digest[:16]}; give the patches in order."
                )
        return cls(base, opened, folder, threads, stack)

    @property
    def from_digest(self) -> str:
        """The state that the base has to have."""
        return self._patches[0].from_digest

    @property
    def to_digest(self) -> str:
        """The state that the last patch promises."""
        return self._patches[-1].to_digest

    @property
    def inventory(self) -> Inventory:
        """The base's."""
        return self._base.inventory

    @cached_property
    def side_files(self) -> tuple[SideFile, ...]:
        """The result's. Raises PatchError."""
        found = self._base.side_files
        for patch in self._patches:
            found = patch.side_files(found)
        return found

    def read_side(self, path: str) -> bytes:
        """A side file of the result."""
        carrier = self._carriers.get(path)
        return self._base.read_side(path) if carrier is None else carrier.read_side(path)

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with bytes of the result. Raises PatchError."""
        for block in self._blocks(index, offset, out.size):
            self._ahead.reached(block)
            self._bring(block, len(self._patches))
        self._base.read(index, offset, out)
        self._lay_kept(index, offset, out)

    # -- in order: what a patch does to a unit needs what the patches before make of all its blocks

    def _bring_all(self, window: Sequence[Block]) -> None:
        for block in window:
            self._bring(block, len(self._patches))

    def _bring(self, block: Block, steps: int) -> None:
        """Have what the first `steps` patches do to a block worked out."""
        place = self._first[block[0]] + block[1]
        for step in range(steps):
            if not self._done[step][place] and self._patches[step].is_changed(*block):
                self._work_out(self._unit(step, block))

    def _work_out(self, unit: _Unit) -> None:
        """Decode a unit, once. Who holds a step's lock takes only those of earlier steps: nobody waits in a ring."""
        index, number = unit.blocks[0]
        with self._lock:
            lock = self._working.setdefault((unit.step, unit.blocks[0]), threading.Lock())
        with lock:
            if self._done[unit.step][self._first[index] + number]:
                return
            for block in unit.blocks:
                self._bring(block, unit.step)
            for decoded in self._decoded(unit):
                self._keep(decoded)
            for index, number in unit.blocks:
                self._done[unit.step][self._first[index] + number] = 1
        with self._lock:
            self._working.pop((unit.step, unit.blocks[0]), None)

    def _unit(self, step: int, block: Block) -> _Unit:
        group = self._patches[step].group_of(*block)
        if group is None:
            return _Unit(step, None, (block,))
        inside = tuple((index, self._geometries[index].block_at(first)) for index, first, _, _ in group.blocks)
        return _Unit(step, group, inside)

    def _decoded(self, unit: _Unit) -> Iterator[Decoded]:
        decoder, scratch = self._decoders[unit.step], self._scratch()
        if unit.group is not None:
            yield from decoder.group(scratch, unit.group)
            return
        ((index, number),) = unit.blocks
        with self._reading[unit.step]:
            code = self._patches[unit.step].code(index, number)
        yield decoder.block(scratch, (index, self._geometries[index].block(number)[0], code))

    def _keep(self, decoded: Decoded) -> None:
        """Remember what a patch did to a block; the last value wins."""
        block = decoded.index, self._geometries[decoded.index].block_at(decoded.start // decoded.width)
        self._kept.put(block, decoded.positions, decoded.new, decoded.width)
        self._at_hand.follow(block, decoded)

    def _lay_kept(self, index: int, offset: int, out: Bytes) -> None:
        """Write into `out`, which holds the base's bytes of a tensor from `offset`, what is known to change there."""
        geometry = self._geometries[index]
        for block in self._blocks(index, offset, out.size):
            start = geometry.block(block[1])[0] * geometry.width
            self._kept.lay(block, geometry.width, offset - start, out)

    def _blocks(self, index: int, offset: int, nbytes: int) -> Iterator[Block]:
        """The blocks of a tensor that hold some of its bytes."""
        geometry = self._geometries[index]
        if nbytes:
            last = geometry.block_at((offset + nbytes - 1) // geometry.width)
            for number in range(geometry.block_at(offset // geometry.width), last + 1):
                yield index, number

    def _windows(self) -> Iterator[list[Block]]:
        """The blocks of each GROUP_BYTES of the tensors."""
        for _, window in groupby(self._placed(), key=lambda placed: placed[0] // GROUP_BYTES):
            yield [block for _, block in window]

    def _placed(self) -> Iterator[tuple[int, Block]]:
        """Every block, with the bytes of the tensors that lie before it."""
        before = 0
        for index, geometry in enumerate(self._geometries):
            for number, (first, _) in enumerate(geometry):
                yield before + first * geometry.width, (index, number)
            before += geometry.elements * geometry.width

    def _scratch(self) -> Scratch:
        """Buffers of this thread."""
        found: Scratch = self._own.__dict__.setdefault("scratch", Scratch())
        return found


@dataclass(slots=True)
class _Held:
    """A block as the patches so far leave it; `version` of what was kept of it then."""

    version: object
    data: Bytes


class _AtHand:
    """What a patch is decoded against: the base with what is kept of the patches before.

    A window for each thread stays at hand and follows its changes: so a block of the base is read once, however many
    patches there are. Who works on a block holds the lock of its unit, so one thread at a time.
    """

    def __init__(self, base: TensorSource, kept: KeptChanges, geometries: Sequence[Geometry], threads: int) -> None:
        self._base, self._kept, self._geometries = base, kept, geometries
        self.inventory, self.side_files = base.inventory, base.side_files
        self._held: OrderedDict[Block, _Held] = OrderedDict()
        self._left = threads * GROUP_BYTES + _LARGEST_BLOCK
        self._lock = threading.Lock()

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out`, a whole block."""
        width = self._geometries[index].width
        block = index, self._geometries[index].block_at(offset // width)
        version = self._kept.version(block)
        held = self._held.get(block)
        if held is not None and held.version is version:
            out[:] = held.data
            return
        self._base.read(index, offset, out)
        self._kept.lay(block, width, 0, out)
        self._hold(block, _Held(version, out.copy()))

    def follow(self, block: Block, decoded: Decoded) -> None:
        """A patch changed a block, and that was kept."""
        held = self._held.get(block)
        if held is None:
            return
        if decoded.positions.size:
            kernels().scatter(decoded.positions, decoded.new, decoded.width, 0, held.data)
        else:
            held.data[:] = decoded.new
        held.version = self._kept.version(block)

    def read_side(self, path: str) -> bytes:
        """Patches read no side files."""
        raise KeyError(path)

    def _hold(self, block: Block, held: _Held) -> None:
        with self._lock:
            earlier = self._held.pop(block, None)
            self._left += (0 if earlier is None else earlier.data.size) - held.data.size
            self._held[block] = held
            while self._left < 0:
                self._left += self._held.popitem(last=False)[1].data.size


class _Ahead:
    """Works out the next windows while the ones before are read: where there are threads to do so."""

    def __init__(
        self, windows: Iterator[list[Block]], work_out: Callable[[list[Block]], None], threads: int, stack: ExitStack
    ) -> None:
        self._windows, self._work_out, self._threads = windows, work_out, threads
        self._begun: deque[Block] = deque()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mailboat-chain") if threads > 1 else None
        if self._pool is not None:
            stack.callback(self._pool.shutdown, cancel_futures=True)

    def reached(self, block: Block) -> None:
        """A block is about to be read. What fails ahead fails again, and is told, where it is read."""
        if self._pool is None:
            return
        with self._lock:
            while self._begun and self._begun[0] <= block:
                self._begun.popleft()
            while len(self._begun) < self._threads and (window := next(self._windows, None)):
                self._begun.append(window[0])
                self._pool.submit(self._work_out, window)
