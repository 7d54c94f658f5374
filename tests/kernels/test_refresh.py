"""Masters to served bytes: rounding bit for bit on every side, only changes written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import numbers, reference
from kernels.numbers import INT4, MXFP4, NVFP4
from tests.kernels.sides import Side, assert_same, bits

BEYOND = 2**31 - 3
KINDS = {NVFP4: 16, MXFP4: 32, INT4: 64}


def masters(rows: int, columns: int, seed: int = 5) -> np.ndarray:
    generator = np.random.default_rng(seed)
    spread = np.exp2(generator.integers(-12, 3, (rows, columns))).astype(np.float32)
    return (generator.normal(size=(rows, columns)) * spread).astype(np.float32)


def stepped(master: np.ndarray, share: float = 0.02) -> np.ndarray:
    generator = np.random.default_rng(6)
    moved = generator.random(master.shape) < share
    return np.where(moved, master * np.float32(1.04), master).astype(np.float32)


def every_bf16() -> np.ndarray:
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def served_groups(rows: int, columns: int, kind: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = np.zeros((rows, columns // group), np.uint16 if kind == INT4 else np.uint8)
    return np.zeros((rows, columns // 2), np.uint8), scales, np.zeros(1, np.float32)


# --- BF16 and FP16 ----------------------------------------------------------------------------------------------------


def test_a28_every_bf16_pattern_survives_the_cast(side: Side) -> None:
    every = every_bf16()
    served = np.zeros(65536, np.uint16)
    changes = side.refresh_bf16(every, served)
    quiet = np.arange(65536, dtype=np.uint16)
    quiet[np.isnan(every)] |= 0x0040
    np.testing.assert_array_equal(served, quiet)
    assert changes.positions.size == np.count_nonzero(quiet)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_round_as_torch_does(side: Side, dtype: str) -> None:
    """Any bits, ties and what lies beside them, what FP16 has as denormals and what it has no room for."""
    import torch

    generator = np.random.default_rng(8)
    near = ((np.arange(5000, dtype=np.uint32) * 13) << 16 | 0x8000).reshape(-1, 1) + np.array([0, 1, 2**32 - 1])
    small = generator.integers(98 << 10, 145 << 10, 9000).astype(np.uint32) << 13 | generator.choice(
        [0, 0x1000, 0xFFF, 1], 9000
    )
    master = np.concatenate([generator.integers(0, 2**32, 20000), near.reshape(-1), small]).astype(np.uint32)
    master = master.view(np.float32)
    master = np.concatenate([master, -master])
    master = master[~np.isnan(master)]
    served = np.zeros(master.size, np.uint16)
    getattr(side, {"bfloat16": "refresh_bf16", "float16": "refresh_fp16"}[dtype])(master, served)
    expected = torch.from_numpy(master).to(getattr(torch, dtype)).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(served, expected)


def test_a28_nans_of_fp16_keep_sign_and_upper_payload(side: Side) -> None:
    payloads = np.array([1, 0x1FFF, 0x2000, 0x3FFFFF, 0x400000, 0x7FFFFF], np.uint32) | np.uint32(0x7F80_0000)
    served = np.zeros(12, np.uint16)
    side.refresh_fp16(np.concatenate([payloads, payloads | np.uint32(1 << 31)]).view(np.float32), served)
    expected = np.array([0x7E00, 0x7E00, 0x7E01, 0x7FFF, 0x7E00, 0x7FFF], np.uint16)
    np.testing.assert_array_equal(served, np.concatenate([expected, expected | 0x8000]))


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "room"), [((0,), None), ((1,), None), ((4099,), None), ((4099,), 3), ((7, 613), 40)])
def test_casts_write_only_what_changed(side: Side, format: str, shape: tuple[int, ...], room: int | None) -> None:
    size = int(np.prod(shape))
    master = masters(1, max(size, 1)).reshape(-1)[:size].reshape(shape)
    served, twin = (getattr(reference, f"to_{format}")(master).copy() for _ in range(2))
    options = {} if side.name == "reference" else {"expected": room}
    moved = stepped(master)
    refresh = f"refresh_{format}"
    expected = getattr(reference, refresh)(moved, twin, first=2**31 - 2)
    assert_same(getattr(side, refresh)(moved, served, first=2**31 - 2, **options), expected)
    np.testing.assert_array_equal(served, twin)


def test_bf16_rows_with_distances(side: Side) -> None:
    if side.name == "reference":
        pytest.skip("the twin writes dense arrays")
    master = masters(40, 30)
    served = np.full((40, 37), 7, np.uint16)
    changes = side.refresh_bf16(master[:, :29], served[:, :29])
    np.testing.assert_array_equal(served[:, :29], reference.to_bf16(master)[:, :29])
    assert (served[:, 29:] == 7).all() and changes.positions.size == 40 * 29


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8_shapes(rows: int, columns: int, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, columns), np.uint8), np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (129, 257), (6, 2100), (128, 128)])
def test_fp8(side: Side, by_row: bool, shape: tuple[int, int]) -> None:
    if by_row and shape[0] > 10:
        shape = (9, shape[1])
    block = (1, shape[1]) if by_row else (128, 128)
    codes, scales = fp8_shapes(*shape, block)
    twin_codes, twin_scales = codes.copy(), scales.copy()
    for master in (masters(*shape), stepped(masters(*shape)), reference.to_bf16(masters(*shape))):
        found = side.refresh_fp8(master, codes, scales, block)
        expected = reference.refresh_fp8(master, twin_codes, twin_scales, block)
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            assert_same(mine, theirs)
        assert found[2] == expected[2] == 0
        np.testing.assert_array_equal(codes, twin_codes)
        np.testing.assert_array_equal(bits(scales), bits(twin_scales))


def test_fp8_rounds_as_torch_does(side: Side) -> None:
    import torch

    master = masters(128, 256)
    codes, scales = fp8_shapes(128, 256, (128, 128))
    side.refresh_fp8(master, codes, scales, (128, 128))
    cast = torch.from_numpy(master).bfloat16().float().view(1, 128, 2, 128)
    amax = cast.abs().amax(dim=(1, 3), keepdim=True)
    factor = torch.full_like(amax, 448) / amax  # 448.0 / amax would be 448 x (1 / amax) there
    wanted = (cast * factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).view(128, 256).numpy()
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(scales, (torch.ones_like(factor) / factor).view(1, 2).numpy())


@pytest.mark.parametrize("by_row", [False, True])
def test_fp8_of_every_bf16_pattern(side: Side, by_row: bool) -> None:
    """Zeros, denormals, huge numbers, infinities and NaNs."""
    master = every_bf16().reshape((64, 1024) if by_row else (512, 128))
    block = (1, 1024) if by_row else (128, 128)
    codes, scales = fp8_shapes(*master.shape, block)
    twins = codes.copy(), scales.copy()
    found, expected = side.refresh_fp8(master, codes, scales, block), reference.refresh_fp8(master, *twins, block)
    np.testing.assert_array_equal(codes, twins[0])
    np.testing.assert_array_equal(bits(scales), bits(twins[1]))
    assert found[2] == expected[2] == 256


def test_fp8_with_less_room_than_changes(side: Side) -> None:
    if side.name == "reference":
        pytest.skip("the twin needs no room")
    master = masters(256, 129)
    codes, scales = fp8_shapes(256, 129, (128, 128))
    twins = codes.copy(), scales.copy()
    found = side.refresh_fp8(master, codes, scales, (128, 128), expected=17000)
    expected = reference.refresh_fp8(master, *twins, (128, 128))
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


# --- Four bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shape", [(1, 64), (3, 320), (50, 128)])
def test_groups(side: Side, kind: int, shape: tuple[int, int]) -> None:
    group = KINDS[kind]
    served = served_groups(*shape, kind, group)
    twins = tuple(part.copy() for part in served)
    for master in (masters(*shape), stepped(masters(*shape)), reference.to_bf16(masters(*shape))):
        found = side.refresh_groups(master, *served, kind, group)
        expected = reference.refresh_groups(master, *twins, kind, group)
        for mine, theirs in zip(found[:3], expected[:3], strict=True):
            assert_same(mine, theirs)
        assert found[3] == expected[3] == 0
        for mine, theirs in zip(served, twins, strict=True):
            np.testing.assert_array_equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("kind", list(KINDS))
def test_groups_of_every_bf16_pattern(side: Side, kind: int) -> None:
    master = every_bf16().reshape(512, 128)
    served = served_groups(512, 128, kind, KINDS[kind])
    twins = tuple(part.copy() for part in served)
    found = side.refresh_groups(master, *served, kind, KINDS[kind])
    expected = reference.refresh_groups(master, *twins, kind, KINDS[kind])
    for mine, theirs in zip(served, twins, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(theirs))
    assert found[3] == expected[3] == 256


def test_an_all_zero_matrix_has_scales_and_keeps_signs(side: Side) -> None:
    master = np.zeros((2, 64), np.float32)
    master[1] = -0.0
    for kind, group in KINDS.items():
        codes, scales, whole = served_groups(2, 64, kind, group)
        side.refresh_groups(master, codes, scales, whole, kind, group)
        zero = {NVFP4: (0x00, 0x88), MXFP4: (0x00, 0x88), INT4: (0x88, 0x88)}[kind]
        assert set(codes[0].tolist()) == {zero[0]} and set(codes[1].tolist()) == {zero[1]}
        assert set(scales.reshape(-1).tolist()) == {{NVFP4: 1, MXFP4: 127, INT4: 0x3F80}[kind]}


def test_rounding_to_four_bits_is_to_nearest_even() -> None:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.linspace(0, 6.5, 2601).astype(np.float32)
    codes = reference.round_code(np.minimum(values, np.float32(6)).view(np.uint32), numbers.E2M1)
    distance = np.abs(values[:, None] - grid[None, :])
    best = np.sort(distance, axis=1)
    for value, code, near in zip(values, codes, best, strict=True):
        assert abs(value - grid[code]) == near[0]
        if near[0] == near[1]:
            assert code % 2 == 0


# --- NaNs and infinities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["_refresh_fp8_row", "_refresh_fp8_block", "_refresh_groups"])
def test_more_than_2_to_the_31_nans_are_counted(side: Side, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """As in an array of which most lies elsewhere: other programs have counted before."""
    if side.name == "reference":
        pytest.skip("the twin counts as NumPy does")
    from kernels import refresh

    class Late:
        real = getattr(refresh, kernel)

        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **named: Any) -> None:
                given[dict(zip(self.real.arg_names, range(len(given)), strict=False))["problems"]].add_(BEYOND)
                self.real[grid](*given, **named)

            return launch

    monkeypatch.setattr(refresh, kernel, Late())
    master = masters(2, 64)
    master[:, 3:8] = np.nan
    if kernel == "_refresh_groups":
        found = side.refresh_groups(master, *served_groups(2, 64, INT4, 64), INT4, 64)
    else:
        block = (1, 64) if kernel == "_refresh_fp8_row" else (128, 128)
        found = side.refresh_fp8(master, *fp8_shapes(2, 64, block), block)
    assert found[-1] == BEYOND + 10


# --- What the kernels would misread -----------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["float16", "float64", "columns apart", "transposed", "a vector"])
@pytest.mark.parametrize("format", ["fp8", "groups"])
def test_masters_that_would_be_misread_are_refused(side: Side, format: str, master: str) -> None:
    if side.name == "reference":
        pytest.skip("the twin reads what NumPy views")
    dense = masters(64, 64)
    given = {
        "float16": dense.astype(np.float16), "float64": dense.astype(np.float64), "a vector": dense.reshape(-1),
        "columns apart": masters(64, 128)[:, ::2], "transposed": dense.T,
    }[master]  # fmt: skip
    with pytest.raises(ValueError, match="dense rows, in FP32 or BF16"):
        if format == "fp8":
            side.refresh_fp8(given, *fp8_shapes(64, 64, (128, 128)), (128, 128))
        else:
            side.refresh_groups(given, *served_groups(64, 64, NVFP4, 16), NVFP4, 16)


def test_a_cast_into_another_shape_is_refused(side: Side) -> None:
    if side.name == "reference":
        pytest.skip("the twin reads what NumPy views")
    for served in (np.zeros(70, np.uint16), np.zeros(64, np.uint32)):
        with pytest.raises(ValueError, match="same shape"):
            side.refresh_bf16(masters(1, 64).reshape(-1), served)


def test_rows_without_columns_have_no_scales(side: Side) -> None:
    if side.name == "reference":
        pytest.skip("the twin divides by the block")
    codes = np.zeros((3, 0), np.uint8)
    found = side.refresh_fp8(np.zeros((3, 0), np.float32), codes, np.zeros((3, 0), np.float32), (1, 0))
    assert [found[0].positions.size, found[1].positions.size, found[2]] == [0, 0, 0]


def test_matrices_without_rows_have_no_codes(side: Side) -> None:
    """NumPy's strides of empty arrays are 0, which is no distance between columns."""
    empty = np.zeros((0, 64), np.float32)
    assert empty.strides == (0, 0)
    for block in ((128, 128), (1, 64)):
        found = side.refresh_fp8(empty, np.zeros((0, 64), np.uint8), np.zeros((0, 1), np.float32), block)
        assert [found[0].positions.size, found[1].positions.size, found[2]] == [0, 0, 0]
    for kind, group in KINDS.items():
        served = served_groups(0, 64, kind, group)
        changed = side.refresh_groups(empty, *served, kind, group)
        assert [part.positions.size for part in changed[:3]] == [0, 0, int(kind == NVFP4)] and changed[3] == 0
        assert served[2][0] == (kind == NVFP4), "the scale of nothing is 1"
