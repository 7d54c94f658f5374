"""Whatever a step looks like, the patch is not larger than what the best of the other systems ship."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.peers import PEERS
from mailboat.checkpoint.source import ArraySource
from mailboat.patch import build_patch
from tests.patch.models import changed
from tests.patch.test_contextual import stepped, weights

Pair = tuple[str, np.ndarray, np.ndarray]
TENSORS = 3
BLOCK = 1 << 20  # more than one chunk, and more than one block where three tensors are one


def noise(count: int, width: int, seed: int) -> np.ndarray:
    """Random bits."""
    return np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8).view(f"u{width}")


def scales(count: int, seed: int) -> np.ndarray:
    """FP32 scales as bits."""
    return np.abs(np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(1e-3)).view(np.uint32)


def times(bits: np.ndarray, factor: np.ndarray | float) -> np.ndarray:
    """FP32 bits after a multiplication."""
    product: np.ndarray = (bits.view(np.float32) * np.asarray(factor, np.float32)).astype(np.float32).view(np.uint32)
    return product


def moved(bits: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Steps of a few units at random places."""
    return changed(bits.view(np.uint8), bits.itemsize, share, seed, step=2).view(bits.dtype)


def cases() -> Iterator[tuple[str, Pair]]:
    """(what, (dtype, old bits, new bits))."""
    for count in (100, 100_000, BLOCK):
        zeros = np.zeros(count, np.uint16)
        bits = weights(count, 1)
        yield f"constant to constant, {count}", ("BF16", zeros, np.full(count, 0x3F80, np.uint16))
        yield f"weights to zeros, {count}", ("BF16", bits, zeros)
        yield f"zeros to weights, {count}", ("BF16", zeros, bits)
        yield f"a few ones among zeros, {count}", ("BF16", zeros, moved(zeros, 0.002, 2))
        yield f"all by one step, {count}", ("BF16", bits, bits + np.uint16(1))
        yield f"all by steps, {count}", ("BF16", bits, moved(bits, 1.0, 3))
        far = np.random.default_rng(4).normal(0, 90, count).astype(np.int16).view(np.uint16)
        yield f"all by far steps, {count}", ("BF16", bits, bits + far)
        yield f"random bits, {count}", ("BF16", noise(count, 2, 5), noise(count, 2, 6))
        yield f"random bytes, {count}", ("U8", noise(count, 1, 7), noise(count, 1, 8))
        held = scales(count, 9)
        nearby = 1 + np.random.default_rng(10).normal(0, 1e-4, count)
        yield f"all scales a little, {count}", ("F32", held, times(held, nearby))
        yield f"all scales by a factor, {count}", ("F32", held, times(held, 1.1))
        rare = np.where(np.random.default_rng(11).random(count) < 0.01, 1.001, 1.0)
        yield f"a few scales, {count}", ("F32", held, times(held, rare))
        exponents = np.random.default_rng(12).integers(110, 125, count, dtype=np.uint8)
        yield f"all E8M0 scales, {count}", ("F8_E8M0", exponents, exponents + np.uint8(1))
        yield f"a few E8M0 scales, {count}", ("F8_E8M0", exponents, moved(exponents, 0.01, 13))
        codes = noise(count, 1, 14)
        yield f"E4M3 scales, {count}", ("F8_E4M3", codes, moved(codes, 0.05, 15))
    for count in (1, 2, 5, 33, 500):
        for width, dtype in ((1, "U8"), (2, "BF16"), (4, "F32"), (8, "F64")):
            old = noise(count, width, count)
            yield f"tiny {dtype} {count}", (dtype, old, noise(count, width, count + 1))
            last = old.copy()
            last[-1] ^= 1
            yield f"tiny {dtype} {count}, one changed", (dtype, old, last)
    bits = weights(BLOCK, 16).reshape(1024, 1024)
    rows = bits.copy()
    rows[5:1000:97] += np.uint16(1)
    yield "whole rows by a step", ("BF16", bits, rows)
    columns = bits.copy()
    columns[:, ::16] ^= np.uint16(1)
    yield "whole columns by a step", ("BF16", bits, columns)
    yield "as in training", ("BF16", bits, stepped(bits.reshape(-1), 17).reshape(1024, 1024))
    for share in (0.02, 0.06, 0.07, 0.24, 0.26, 0.5):
        yield f"{share} by steps", ("BF16", bits, moved(bits.reshape(-1), share, 18).reshape(1024, 1024))
        other = changed(bits.reshape(-1).view(np.uint8), 2, share, 19, step=0).view(np.uint16)
        yield f"{share} to random bits", ("BF16", bits, other.reshape(1024, 1024))


def payloads(folder: Path, pair: Pair, tensors: int = 1) -> tuple[int, int]:
    """Bytes that follow from the tensors: ours without the file's header, which is the same for any model; the best
    peer's.
    """
    dtype, old, new = pair
    olds, news = np.array_split(old, tensors), np.array_split(new, tensors)
    base, target = (
        ArraySource({f"t{i}": part for i, part in enumerate(parts)}, dtypes={f"t{i}": dtype for i in range(tensors)})
        for parts in (olds, news)
    )
    raw = build_patch(base, target, folder / "patch").path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert header < 1024
    sizes = []
    for peer in PEERS.values():
        pairs = zip(olds, news, strict=True)
        sizes.append(sum(len(piece) for a, b in pairs for piece in peer.encode(a.reshape(-1), b.reshape(-1))))
    return len(raw) - header, min(sizes)


CASES = dict(cases())


@pytest.mark.parametrize("what", CASES)
def test_never_larger_than_the_best_peer(tmp_path: Path, what: str) -> None:
    ours, best = payloads(tmp_path, CASES[what])
    assert ours <= best * 1.01 + 64


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([(1, "U8"), (1, "F8_E4M3"), (1, "F8_E8M0"), (2, "BF16"), (2, "F16"), (4, "F32"), (8, "I64")]),
    st.integers(TENSORS, 60_000),
    st.sampled_from([0.0005, 0.004, 0.03, 0.1, 0.3, 0.7, 1.0]),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 1000),
)  # fmt: skip
def test_never_larger_than_the_best_peer_at_any_density(
    tmp_path: Path, kind: tuple[int, str], count: int, share: float, step: int, seed: int
) -> None:
    width, dtype = kind
    old = noise(count, width, seed)
    new = changed(old.view(np.uint8), width, share, seed, step=step).view(old.dtype)
    ours, best = payloads(tmp_path, (dtype, old, new), TENSORS)
    assert ours <= best * 1.01 + 64 * TENSORS
