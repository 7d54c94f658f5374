"""Bounded parallel work on blocks: reusable buffers, and results in the order of the work.

The number of blocks in flight follows from their size, so memory stays within one budget however many threads there
are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.source import ArraySource, Bytes, TensorSource
from mailboat.patch.backends import kernels
from mailboat.patch.format import BLOCK_ELEMENTS

Words = npt.NDArray[np.uint64]
Work = TypeVar("Work")
Done = TypeVar("Done")
BUDGET = 120 << 20
MAX_THREADS = 16


class Scratch:
    """Named buffers for one block, kept for the next one; and what computes, looked up once."""

    def __init__(self) -> None:
        self.kernels = kernels()
        self._held: dict[str, Words] = {}

    def words(self, name: str, nbytes: int) -> tuple[Words, Bytes]:
        """A buffer of `nbytes` as zero-padded 64-bit words, and as bytes. Its bytes are whatever was there before."""
        count = -(-nbytes // 8)
        held = self._held.get(name)
        if held is None or held.size < count:
            # Grown by powers of two: a few sizes, each touched only where it is used.
            held = self._held[name] = np.empty(1 << max(6, (count - 1).bit_length()), np.uint64)
        words = held[:count]
        if nbytes % 8:
            words[-1] = 0
        return words, words.view(np.uint8)[:nbytes]

    def bytes(self, name: str, nbytes: int) -> Bytes:
        """A buffer of `nbytes`."""
        return self.words(name, nbytes)[1]

    def positions(self, count: int) -> npt.NDArray[np.uint32]:
        """Room for `count` positions."""
        return self.bytes("positions", count * 4).view(np.uint32)


def address_of(words: Words) -> int:
    """Where an array lies in memory."""
    address: int = words.__array_interface__["data"][0]
    return address


def source_words(
    scratch: Scratch, name: str, source: TensorSource, index: int, span: tuple[int, int]
) -> tuple[Words, Bytes]:
    """A tensor's bytes [start, end) = `span`, to be read only, as zero-padded words and as bytes.

    In place where they lie in memory and fit (kernels take writable arrays only, though they never write here).
    """
    start, end = span
    if isinstance(source, ArraySource) and not (start | end) % 8 and (whole := source.words(index)) is not None:
        return whole[start // 8 : end // 8], source.view(index)[start:end]
    words, data = scratch.words(name, end - start)
    source.read(index, start, data)
    return words, data


def thread_count(threads: int | None) -> int:
    """How many threads to use: as asked for, else as many as this process may run on."""
    return max(1, min(threads or len(os.sched_getaffinity(0)), MAX_THREADS))


def slots_for(width: int, threads: int) -> int:
    """Blocks of `width`-byte elements that may be in flight: two per thread where the budget allows, at least one."""
    each = BLOCK_ELEMENTS * (6 * width + 5)
    return max(1, min(2 * threads, BUDGET // each))


class _Inline(Executor):
    """A pool without threads: where there is one core, handing work over costs more than it gives."""

    def submit(self, fn: Callable[..., Done], /, *args: Any, **kwargs: Any) -> Future[Done]:
        """Do it now."""
        future: Future[Done] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future hands it on
            future.set_exception(error)
        return future


def workers(threads: int) -> Executor:
    """A pool for block work."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mailboat-block") if threads > 1 else _Inline()


def in_order(
    pool: Executor, slots: int, work: Iterable[Work], do: Callable[[Scratch, Work], Done]
) -> Generator[Done, None, None]:
    """Yield `do(scratch, item)` for each item in order.

    A result's buffers are reused after the next one is asked for.
    """
    if isinstance(pool, _Inline):
        scratch = Scratch()
        for item in work:
            yield do(scratch, item)
        return
    free = [Scratch() for _ in range(slots)]
    pending: deque[tuple[Scratch, Future[Done]]] = deque()
    try:
        for item in work:
            if not free:
                scratch, future = pending.popleft()
                yield future.result()
                free.append(scratch)
            scratch = free.pop()
            pending.append((scratch, pool.submit(do, scratch, item)))
        while pending:
            yield pending.popleft()[1].result()
    finally:
        for _, future in pending:
            future.cancel()
