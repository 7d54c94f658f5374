"""What other systems ship, as the benches compare it: each encodes a list of tensors and applies the result in place.

Faithful to the formats, in this process and with the same threads as ours; nothing here is part of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash

from mailboat.patch.streams import zstd

Item = TypeVar("Item")
Result = TypeVar("Result")
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
_GAP_ESCAPE = 0xFFFF
_SHORTEST_PREFIX = 8
_P = zstd.CompressionParameter


def over(threads: int, do: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do something to all tensors; the largest ones are first in line where there are threads."""
    if threads == 1:
        return [do(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(do, items))


class Peer:
    """One tensor at a time; `old` and `new` are arrays of unsigned integers."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:
        """What is sent, as objects with a length in bytes."""
        raise NotImplementedError

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """Turn `old` into the new tensor, in place."""
        raise NotImplementedError


class XorZstd(Peer):
    """XOR, zstd level 1, xxh3-128 of each tensor: slime, miles, SkyRL, Stitch."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:
        """XOR, compress, hash."""
        return [zstd.compress(np.bitwise_xor(old, new).data.cast("B"), level=1), xxhash.xxh3_128_digest(new)]

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """Decompress, XOR, compare the hash."""
        np.bitwise_xor(old, np.frombuffer(zstd.decompress(sent[0]), old.dtype), out=old)
        if xxhash.xxh3_128_digest(old) != sent[1]:
            raise SystemExit("xor_zstd1 gives other bytes")


class Int32Values(Peer):
    """32-bit indices and raw values, no checksum: TRL."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:
        """Indices, values."""
        where = np.flatnonzero(old != new).astype(np.int32)
        return [where.tobytes(), new[where].tobytes()]

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """One indexed assignment."""
        old[np.frombuffer(sent[0], np.int32)] = np.frombuffer(sent[1], old.dtype)


class GapZstd(Peer):
    """16-bit gaps and raw values through zstd level 1, no checksum: PULSE."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:
        """Gaps (longer ones as runs of an escape), values, compressed together."""
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1)
        escapes = (gaps - 1) // _GAP_ESCAPE
        codes = np.full(where.size + int(escapes.sum()), _GAP_ESCAPE, np.uint16)
        codes[np.cumsum(escapes) + np.arange(where.size)] = (gaps - 1) % _GAP_ESCAPE
        return [codes.size.to_bytes(4, "little"), zstd.compress(codes.tobytes() + new[where].tobytes(), level=1)]

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """Sum the gaps up, assign."""
        raw = zstd.decompress(sent[1])
        codes = np.frombuffer(raw, np.uint16, int.from_bytes(sent[0], "little"))
        ends = codes != _GAP_ESCAPE
        where = np.cumsum(codes.astype(np.int64) + ends)[ends] - 1
        old[where] = np.frombuffer(raw, old.dtype, offset=codes.nbytes)


def _prefix(old: np.ndarray) -> Any:
    """The old tensor as a prefix; zstd takes none of less than eight bytes."""
    return zstd.ZstdDict(old.tobytes(), is_raw=True).as_prefix if old.nbytes >= _SHORTEST_PREFIX else None


class ZstdPatchFrom(Peer):
    """zstd --patch-from: the old tensor is the dictionary."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:
        """Long matches into the prefix."""
        log = min(30, max(10, (2 * new.nbytes + 64).bit_length()))
        options = {_P.compression_level: 1, _P.enable_long_distance_matching: 1, _P.window_log: log}
        return [zstd.compress(new.tobytes(), options=options, zstd_dict=_prefix(old))]

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """Decompress against the old tensor."""
        options = {zstd.DecompressionParameter.window_log_max: 31}
        old[:] = np.frombuffer(zstd.decompress(sent[0], zstd_dict=_prefix(old), options=options), old.dtype)


class ZstdFull(Peer):
    """The whole new tensor through zstd level 1."""

    def encode(self, old: np.ndarray, new: np.ndarray) -> list[Any]:  # noqa: ARG002 - the old one is not used
        """Compress."""
        return [zstd.compress(new.data.cast("B"), level=1)]

    def apply(self, sent: list[Any], old: np.ndarray) -> None:
        """Decompress."""
        old[:] = np.frombuffer(zstd.decompress(sent[0]), old.dtype)


PEERS: dict[str, Peer] = {
    "xor_zstd1": XorZstd(),
    "int32_values": Int32Values(),
    "u16gap_zstd1": GapZstd(),
    "zstd_patch_from": ZstdPatchFrom(),
    "zstd_full": ZstdFull(),
}
