"""The pooled streams of a patch part: raw bytes cut every 128 KiB, each chunk one zstd frame, stored, or one byte.

A reader never holds more than one chunk, and never more than the size that the table promised; a writer never holds a
stream in memory.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import BinaryIO

import numpy as np

from mailboat.checkpoint.source import Bytes
from mailboat.errors import PatchError
from mailboat.patch.format import CHUNK_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZSTD_VERSION: str = zstd.zstd_version
_P = zstd.CompressionParameter
# Steps of weights look random apart from their frequencies, so cheap matches only spoil the Huffman code: the smallest
# hash table finds next to none (2.68 bits a step on MiniLM where level 1 takes 2.95 and the entropy is 2.36). An
# optimal parse over small tables gives 2.53 at 22 MB/s; a patch of many changes can't afford that throughout, so only
# its first chunks get it, and none where speed is asked for.
_OPTIONS: dict[str, dict[int, int]] = {
    "values": {
        _P.compression_level: 1, _P.strategy: zstd.Strategy.fast, _P.min_match: 7, _P.hash_log: 6, _P.window_log: 17,
    },
    "values, first": {
        _P.compression_level: 16, _P.strategy: zstd.Strategy.btopt, _P.min_match: 5, _P.hash_log: 10, _P.chain_log: 10,
        _P.search_log: 1, _P.target_length: 32, _P.window_log: 17,
    },
    "literals": {_P.compression_level: 1, _P.window_log: 17},
    "dense": {_P.compression_level: 1, _P.window_log: 17},
}  # fmt: skip
_FIRST_CHUNKS = 64
_SMALL_TABLE = 1 << 20
_WINDOW_LOG_MAX = 27
_PENDING = 8
_SAMPLE_BYTES, _SAMPLES = 16384, 8

ReadAt = Callable[[int, int], bytes]


def compress_table(raw: bytes) -> bytes:
    """One frame for the table."""
    return zstd.compress(raw, level=19 if len(raw) <= _SMALL_TABLE else 3)


def decompress_exactly(frame: bytes, size: int, what: str) -> bytes:
    """Undo one frame that must hold exactly `size` bytes and end where it ends. Raises PatchError."""
    try:
        if zstd.get_frame_info(frame).decompressed_size != size:
            raise PatchError(f"The patch's {what} does not have the size that was promised; fetch or build it again.")
        decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX})
        raw = decoder.decompress(frame, max_length=size + 1)
        # Draining what the limit held back lets the decoder reach the end of the frame.
        raw += b"" if decoder.eof else decoder.decompress(b"", max_length=1)
    except zstd.ZstdError:
        raise PatchError(f"The patch's {what} is not a zstd frame; fetch or build the patch again.") from None
    if len(raw) != size or not decoder.eof or decoder.unused_data:
        raise PatchError(f"The patch's {what} is cut short or too long; fetch or build the patch again.")
    return raw


def _compress_chunk(raw: bytes, stream: str) -> bytes:
    return raw[:1] if raw == raw[:1] * len(raw) else _compressed(raw, stream)


def _compressed(raw: bytes, stream: str) -> bytes:
    packed = zstd.compress(raw, options=_OPTIONS[stream])
    return packed if len(packed) < len(raw) else raw


def estimate(data: Bytes, stream: str) -> int:
    """About how many bytes `data` takes in a stream: samples are compressed, so it depends on nothing but the bytes."""
    if data.size <= _SAMPLES * _SAMPLE_BYTES:
        return compressed_size(data, stream)
    step = (data.size - _SAMPLE_BYTES) // (_SAMPLES - 1)
    packed = sum(len(_compressed(data[i * step : i * step + _SAMPLE_BYTES].tobytes(), stream)) for i in range(_SAMPLES))
    return packed * data.size // (_SAMPLES * _SAMPLE_BYTES)


def compressed_size(data: Bytes, stream: str) -> int:
    """How many bytes `data` takes in a stream; what does not fill a chunk shares one with others."""
    pieces = [data[start : start + CHUNK_BYTES].tobytes() for start in range(0, data.size, CHUNK_BYTES)]
    return sum(
        len(_compress_chunk(piece, stream) if len(piece) == CHUNK_BYTES else _compressed(piece, stream))
        for piece in pieces
    )


class ChunkWriter:
    """Appends to a stream; chunks are compressed on `pool` and written to `file` in order."""

    def __init__(self, stream: str, file: BinaryIO, pool: Executor, *, for_size: bool) -> None:
        self.sizes: list[int] = []
        self._chunks = 0
        self._stream, self._for_size = stream, for_size
        self._file = file
        self._pool = pool
        self._chunk = bytearray()
        self._pending: deque[Future[bytes]] = deque()

    def append(self, data: Bytes) -> None:
        """Add raw bytes."""
        view = data.data
        while view:
            take = min(len(view), CHUNK_BYTES - len(self._chunk))
            self._chunk += view[:take]
            view = view[take:]
            if len(self._chunk) == CHUNK_BYTES:
                self._submit()

    def finish(self) -> int:
        """Write what is pending; returns the stream's size in the file."""
        if self._chunk:
            self._submit()
        while self._pending:
            self._write()
        return sum(self.sizes)

    def _submit(self) -> None:
        if len(self._pending) == _PENDING:
            self._write()
        first = self._for_size and self._stream == "values" and self._chunks < _FIRST_CHUNKS
        self._pending.append(
            self._pool.submit(_compress_chunk, bytes(self._chunk), "values, first" if first else self._stream)
        )
        self._chunks += 1
        self._chunk.clear()

    def _write(self) -> None:
        packed = self._pending.popleft().result()
        self._file.write(packed)
        self.sizes.append(len(packed))


class ChunkReader:
    """Reads raw ranges of a chunked stream. Not thread safe; the last chunk is kept for the next range."""

    def __init__(self, stream: str, raw_size: int, sizes: np.ndarray, read_at: ReadAt, start: int) -> None:
        self._stream = stream
        self._raw_size = raw_size
        self._sizes = sizes
        self._offsets = start + np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])
        self._read_at = read_at
        self._held = -1
        self._chunk = np.empty(0, np.uint8)

    def read(self, start: int, out: Bytes) -> None:
        """Fill `out` with raw bytes from `start`. Raises PatchError."""
        done = 0
        while done < out.size:
            number, skip = divmod(start + done, CHUNK_BYTES)
            piece = self._decode(number)[skip : skip + out.size - done]
            out[done : done + piece.size] = piece
            done += piece.size

    def _decode(self, number: int) -> Bytes:
        if number != self._held:
            size = min(CHUNK_BYTES, self._raw_size - number * CHUNK_BYTES)
            packed = self._read_at(int(self._offsets[number]), int(self._sizes[number]))
            raw = _unpacked(packed, size, self._stream)
            self._chunk, self._held = np.frombuffer(raw, np.uint8), number
        return self._chunk


def _unpacked(packed: bytes, size: int, stream: str) -> bytes:
    if len(packed) == size:
        return packed
    return packed * size if len(packed) == 1 else decompress_exactly(packed, size, f"stream of {stream}")
