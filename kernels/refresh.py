"""From the trainer's masters to the served bytes in one pass: cast, quantise, compare, write only what changed.

Inputs are FP32 masters or BF16 weights, their rows dense; both are taken as BF16, so scales rarely move. Formats and
rounding: docs/format/quantisers.md. Each function writes into the served tensors in place and returns what changed, old
bytes included; it counts NaNs and infinities instead of stopping, because a kernel can't.

`expected`: room for so many changes is taken; where there are more the kernel leaves those blocks alone and runs again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import numbers
from .changes import ChangeList, Changes, collect, integers, matrix, place_of
from .place import where_it_lies
from .rounding import (
    FP8_MAX_BITS,
    TINY,
    fp8_code,
    fp8_factor,
    reciprocal,
    reserve,
    reserve_rows,
    round_code,
    to_bf16,
    to_fp16,
    unsigned,
    wide,
)

BLOCK = 4096
ROW_BLOCK = 2048
# Elements of a program where scales cover groups: of small groups many, of large ones few.
GROUP_BLOCK = 2048
NVFP4_RANGE = tl.constexpr(numbers.NVFP4_RANGE)
FP4_MAX_BITS = tl.constexpr(numbers.FP4_MAX_BITS)
INT4_HALF_RANGE = tl.constexpr(numbers.INT4_HALF_RANGE)
INT4_HALF_RANGE_BITS = tl.constexpr(0x40F0_0000)
NVFP4 = tl.constexpr(numbers.NVFP4)
MXFP4 = tl.constexpr(numbers.MXFP4)


@triton.jit
def _count_problems(weights, inside, problems):
    """Add the NaNs and infinities of a block to a counter of 64 bits: a tensor may have 2^31 of them."""
    found = tl.sum((((weights & 0x7F800000) == 0x7F800000) & inside).to(tl.int32))
    tl.atomic_add(problems, found.to(tl.int64))


# --- BF16 and FP16 ----------------------------------------------------------------------------------------------------


@triton.jit
def _refresh_cast(
    master, served, total, positions, olds, news, capacity,
    elements, columns, master_stride, served_stride, first,
    FP16: tl.constexpr, CONTIGUOUS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < elements
    place = place_of(index, columns, served_stride, CONTIGUOUS)
    weights = tl.load(master + place_of(index, columns, master_stride, CONTIGUOUS), mask=inside, other=0)
    cast = to_fp16(unsigned(weights)) if FP16 else to_bf16(unsigned(weights))
    new = cast.to(tl.int16, bitcast=True)
    old = tl.load(served + place, mask=inside, other=0)
    changed = (new != old) & inside
    slots, fits = reserve(changed, total, capacity)
    keep = changed & fits
    tl.store(positions + slots, index + first, mask=keep)
    tl.store(olds + slots, old, mask=keep)
    tl.store(news + slots, new, mask=keep)
    tl.store(served + place, new, mask=keep)


@where_it_lies
def refresh_bf16(master: torch.Tensor, served: torch.Tensor, *, first: int = 0, expected: int | None = None) -> Changes:
    """Cast FP32 masters to BF16, compare with the served BF16 bits and write what changed.

    Rows are dense, rows of matrices any distance apart. Moves 6 E bytes and 14 a change.
    """
    return _refresh(master, served, first, expected, fp16=False)


@where_it_lies
def refresh_fp16(master: torch.Tensor, served: torch.Tensor, *, first: int = 0, expected: int | None = None) -> Changes:
    """`refresh_bf16` to FP16: to nearest, ties to even; what is beyond its range becomes infinite."""
    return _refresh(master, served, first, expected, fp16=True)


def _refresh(master: torch.Tensor, served: torch.Tensor, first: int, expected: int | None, *, fp16: bool) -> Changes:
    if master.shape != served.shape or (master.element_size(), served.element_size()) != (4, 2):
        raise ValueError("FP32 masters are cast into 16 bits of the same shape")
    dense = master.is_contiguous() and served.is_contiguous()
    master, served = matrix(integers(master), dense=dense), matrix(integers(served), dense=dense)

    def launch(found: ChangeList) -> None:
        if served.numel():
            _refresh_cast[(triton.cdiv(served.numel(), BLOCK),)](
                master, served, found.total, found.positions, found.old, found.new, found.capacity,
                served.numel(), served.shape[1], master.stride(0), served.stride(0), first,
                FP16=fp16, CONTIGUOUS=dense, SIZE=BLOCK,
            )  # fmt: skip

    return collect(launch, served.numel(), served, expected, writes=True)


def _weights(master: torch.Tensor) -> torch.Tensor:
    """The bits of a matrix that can be quantised."""
    # NumPy puts what is empty 0 bytes apart.
    dense_rows = master.dim() == 2 and (not master.numel() or master.shape[1] == 1 or master.stride(1) == 1)
    if not dense_rows or master.dtype == torch.float16 or master.element_size() not in {2, 4}:
        raise ValueError("weights to quantise are a matrix with dense rows, in FP32 or BF16")
    return integers(master)


# --- FP8, a scale for each block of a matrix --------------------------------------------------------------------------


@triton.jit
def _keep_scale(scale_ptr, at, new, total, positions, olds, news):
    """Compare one scale with the served one, note and write it when it changed; there is room for every scale."""
    old = tl.load(scale_ptr + at)
    changed = old != new
    slot = tl.atomic_add(total, changed.to(tl.int64))
    tl.store(positions + slot, at, mask=changed)
    tl.store(olds + slot, old, mask=changed)
    tl.store(news + slot, new, mask=changed)
    tl.store(scale_ptr + at, new, mask=changed)


@triton.jit
def _refresh_fp8_block(
    master, codes, scales, problems, total, positions, olds, news, capacity,
    scale_total, scale_positions, scale_olds, scale_news,
    rows, columns, master_stride, across, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    down = program // across
    cell = tl.arange(0, HEIGHT * WIDTH)
    row = down * HEIGHT + cell // WIDTH
    column = (program - down * across) * WIDTH + cell % WIDTH
    inside = (row < rows) & (column < columns)
    weights = wide(tl.load(master + row * master_stride + column, mask=inside, other=0))
    amax = tl.max((weights & 0x7FFFFFFF).to(tl.int32), axis=0).to(tl.uint32)
    _count_problems(weights, inside, problems)
    factor = fp8_factor(amax)
    _keep_scale(
        scales, program, reciprocal(factor).to(tl.int32, bitcast=True),
        scale_total, scale_positions, scale_olds, scale_news,
    )  # fmt: skip
    new = fp8_code(weights, factor).to(tl.uint8)
    index = row * columns + column
    old = tl.load(codes + index, mask=inside, other=0)
    changed = (new != old) & inside
    slots, fits = reserve(changed, total, capacity)
    keep = changed & fits
    tl.store(positions + slots, index, mask=keep)
    tl.store(olds + slots, old, mask=keep)
    tl.store(news + slots, new, mask=keep)
    tl.store(codes + index, new, mask=keep)


@triton.jit
def _refresh_fp8_row(
    master, codes, scales, problems, total, positions, olds, news, capacity,
    scale_total, scale_positions, scale_olds, scale_news,
    columns, master_stride, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((SIZE,), tl.int32)
    # A loop from a zero of 64 bits counts in 64: the step past the end of a row of nearly 2^31 would overflow in 32.
    begin = row * 0
    for start in range(begin, columns, SIZE):
        column = start + tl.arange(0, SIZE)
        inside = column < columns
        weights = wide(tl.load(master + row * master_stride + column, mask=inside, other=0))
        largest = tl.maximum(largest, (weights & 0x7FFFFFFF).to(tl.int32))
        _count_problems(weights, inside, problems)
    factor = fp8_factor(tl.max(largest, axis=0).to(tl.uint32))
    _keep_scale(
        scales, row, reciprocal(factor).to(tl.int32, bitcast=True),
        scale_total, scale_positions, scale_olds, scale_news,
    )  # fmt: skip
    for start in range(begin, columns, SIZE):
        column = start + tl.arange(0, SIZE)
        inside = column < columns
        weights = wide(tl.load(master + row * master_stride + column, mask=inside, other=0))
        new = fp8_code(weights, factor).to(tl.uint8)
        index = row * columns + column
        old = tl.load(codes + index, mask=inside, other=0)
        changed = (new != old) & inside
        slots, fits = reserve(changed, total, capacity)
        keep = changed & fits
        tl.store(positions + slots, index, mask=keep)
        tl.store(olds + slots, old, mask=keep)
        tl.store(news + slots, new, mask=keep)
        tl.store(codes + index, new, mask=keep)


@where_it_lies
def refresh_fp8(
    master: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int],
    *, expected: int | None = None,
) -> tuple[Changes, Changes, int]:  # fmt: skip
    """Quantise a matrix to E4M3 codes (dense, uint8 or float8), an FP32 scale for each `block`: (128, 128) or a row.

    factor = 448 / amax; code = E4M3(weight x factor); stored scale = 1 / factor. Returns the changes of codes, those of
    scales (as int32 bits) and the number of NaNs and infinities. Moves 5 E bytes (a row's masters are read twice, the
    second time from the cache) and 10 a change.
    """
    master = _weights(master)
    rows, columns = master.shape
    if codes.shape != master.shape:
        raise ValueError("there is a code for each weight")
    if block not in {(numbers.FP8_BLOCK, numbers.FP8_BLOCK), (1, columns)}:
        raise ValueError("a scale covers a block of 128 x 128 or one row")
    shape = triton.cdiv(rows, block[0]), triton.cdiv(columns, max(block[1], 1))
    if not codes.is_contiguous() or not scales.is_contiguous() or scales.numel() != shape[0] * shape[1]:
        raise ValueError("codes and scales must be dense, with a scale for each block")
    codes, scales = integers(codes).view(-1), integers(scales).view(-1)
    moved, problems = ChangeList(scales.numel(), scales), torch.zeros(1, dtype=torch.int64, device=master.device)

    def launch(found: ChangeList) -> None:
        problems.zero_()
        common = (
            master, codes, scales, problems, found.total, found.positions, found.old, found.new, found.capacity,
            moved.total, moved.positions, moved.old, moved.new,
        )  # fmt: skip
        if codes.numel() and block[0] == 1:
            _refresh_fp8_row[(rows,)](*common, columns, master.stride(0), SIZE=ROW_BLOCK)
        elif codes.numel():
            grid = (len(scales),)
            _refresh_fp8_block[grid](
                *common, rows, columns, master.stride(0), shape[1], HEIGHT=block[0], WIDTH=block[1], num_warps=16
            )

    return collect(launch, codes.numel(), codes, expected, writes=True), moved.sorted(), int(problems)


# --- Four bits, a scale for each group of a row -----------------------------------------------------------------------


@triton.jit
def _amax(master, largest, rows, columns, stride, SIZE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = index // columns
    weights = wide(tl.load(master + row * stride + index - row * columns, mask=row < rows, other=0))
    tl.atomic_max(largest, tl.max((weights & 0x7FFFFFFF).to(tl.int32), axis=0))


@triton.jit
def tensor_scale(amax):
    """NVFP4's scale of the whole tensor: amax / 2688, or 1."""
    usable = (amax >= TINY) & (amax < 0x7F800000)
    one = tl.full(amax.shape, 1.0, tl.float32)
    largest = tl.where(usable, amax, FP8_MAX_BITS).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(usable, tl.div_rn(largest, one * NVFP4_RANGE), one)


@triton.jit
def _nvfp4_scale(amax, tensor):
    """(E4M3 codes of the groups' scales, factors of the weights)."""
    usable = (amax >= TINY) & (amax < 0x7F800000)
    largest = tl.where(usable, amax, 0).to(tl.uint32).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(largest, tl.full(amax.shape, 1.0, tl.float32) * (tensor * 6.0)).to(tl.uint32, bitcast=True)
    code = tl.maximum(round_code(tl.minimum(wanted, FP8_MAX_BITS), 20, 121), 1)
    normal = ((((code >> 3) + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return code, reciprocal(value * tensor)


@triton.jit
def _int4_scale(amax):
    """(BF16 bits of the groups' scales, factors of the weights)."""
    usable = (amax >= TINY) & (amax < 0x7F800000)
    largest = tl.where(usable, amax, INT4_HALF_RANGE_BITS).to(tl.uint32).to(tl.float32, bitcast=True)
    half = tl.full(amax.shape, INT4_HALF_RANGE, tl.float32)
    scale = to_bf16(tl.div_rn(largest, half).to(tl.uint32, bitcast=True)).to(tl.uint32)
    return scale.to(tl.int32), reciprocal((scale << 16).to(tl.float32, bitcast=True))


@triton.jit
def _mxfp4_scale(amax):
    """E8M0 codes of the groups' scales: amax rounded to a power of two (up from 1.75), less two."""
    usable = (amax >= TINY) & (amax < 0x7F800000)
    return tl.where(usable, ((amax + 0x200000) >> 23).to(tl.int32) - 2, 127)


@triton.jit
def _scaled(weights, factor):
    return (weights.to(tl.float32, bitcast=True) * factor).to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _moved(weights, scale):
    """Magnitudes divided by the powers of two that E8M0 codes stand for: exact, on the exponent alone."""
    exponent = ((weights >> 23) & 0xFF).to(tl.int32)
    moved = exponent - scale + 127
    moved = tl.where((exponent == 0) | (moved < 0), 0, tl.minimum(moved, 255))
    return (moved.to(tl.uint32) << 23) | (weights & 0x7FFFFF)


@triton.jit
def _fp4(magnitude, weights):
    return round_code(tl.minimum(magnitude, FP4_MAX_BITS), 22, 127) | ((weights >> 28) & 8).to(tl.int32)


@triton.jit
def _int4(magnitude, weights):
    magnitude = tl.minimum(magnitude, 0x41000000)
    exponent = (magnitude >> 23).to(tl.int32)
    significand = (magnitude & 0x7FFFFF).to(tl.int32) | tl.where(exponent > 0, 0x800000, 0)
    shift = tl.minimum(tl.maximum(150 - exponent, 20), 26)
    steps = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    return tl.where((weights >> 31) == 1, 8 - steps, 8 + tl.minimum(steps, 7))


@triton.jit
def _refresh_groups(
    master, codes, scales, largest, problems, total, positions, olds, news, capacity,
    scale_total, scale_positions, scale_olds, scale_news,
    groups, across, stride, KIND: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    within = group < groups
    row = group // across
    start = row * stride + (group - row * across) * GROUP
    pair = tl.arange(0, HALF)
    inside = within[:, None] & (pair[None, :] >= 0)
    even = wide(tl.load(master + start[:, None] + 2 * pair[None, :], mask=inside, other=0))
    odd = wide(tl.load(master + start[:, None] + 2 * pair[None, :] + 1, mask=inside, other=0))
    _count_problems(even, inside, problems)
    _count_problems(odd, inside, problems)
    highest = tl.maximum((even & 0x7FFFFFFF).to(tl.int32), (odd & 0x7FFFFFFF).to(tl.int32))
    amax = tl.max(highest, axis=1).to(tl.uint32)
    if KIND == MXFP4:
        scale = _mxfp4_scale(amax)
        low = _fp4(_moved(even, scale[:, None]), even)
        high = _fp4(_moved(odd, scale[:, None]), odd)
    elif KIND == NVFP4:
        scale, factor = _nvfp4_scale(amax, tensor_scale(tl.load(largest).to(tl.uint32)))
        low = _fp4(_scaled(even, factor[:, None]), even)
        high = _fp4(_scaled(odd, factor[:, None]), odd)
    else:
        scale, factor = _int4_scale(amax)
        low = _int4(_scaled(even, factor[:, None]), even)
        high = _int4(_scaled(odd, factor[:, None]), odd)
    old_scale = tl.load(scales + group, mask=within, other=0)
    new_scale = scale.to(scales.dtype.element_ty)
    moved = (new_scale != old_scale) & within
    slots, _ = reserve(moved, scale_total, groups)
    tl.store(scale_positions + slots, group, mask=moved)
    tl.store(scale_olds + slots, old_scale, mask=moved)
    tl.store(scale_news + slots, new_scale, mask=moved)
    tl.store(scales + group, new_scale, mask=moved)
    new = (low | (high << 4)).to(tl.uint8)
    index = group[:, None] * HALF + pair[None, :]
    old = tl.load(codes + index, mask=inside, other=0)
    changed = (new != old) & inside
    places, fits = reserve_rows(changed, total, capacity)
    keep = changed & fits
    tl.store(positions + places, index, mask=keep)
    tl.store(olds + places, old, mask=keep)
    tl.store(news + places, new, mask=keep)
    tl.store(codes + index, new, mask=keep)


@triton.jit
def _refresh_tensor_scale(largest, served, total, positions, olds, news):
    new = tensor_scale(tl.load(largest).to(tl.uint32)).to(tl.int32, bitcast=True)
    _keep_scale(served, tl.program_id(0).to(tl.int64), new, total, positions, olds, news)


@where_it_lies
def refresh_groups(
    master: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, served_scale: torch.Tensor, kind: int, group: int,
    *, expected: int | None = None, amax: int | None = None,
) -> tuple[Changes, Changes, Changes, int]:  # fmt: skip
    """Quantise a matrix whose rows are whole groups to four bits: `kind` is numbers.NVFP4, MXFP4 or INT4.

    NVFP4: t = amax of the tensor / 2688, c = E4M3(amax of the group / (6 t)), code = E2M1(w (1 / (c t))). MXFP4 (OCP MX
    1.0): c = floor(log2(amax)), one more from 1.75 times that power on, less 2; code = E2M1(w / 2^c). INT4:
    s = BF16(amax / 7.5); code = w (1 / s), to nearest. Bit for bit, zeros and limits too: docs/format/quantisers.md.

    `codes`: dense bytes, two codes each, the first one low. `scales`: dense, one a group: E4M3 codes (NVFP4), E8M0
    codes (MXFP4), BF16 bits (INT4). `served_scale`: one FP32, written for NVFP4 alone. Returns the changes of bytes, of
    scales and of the tensor's scale, and the number of NaNs and infinities. Moves 4.5 E bytes and E / group scales;
    NVFP4 reads the masters once more before, for the tensor's largest magnitude, unless `amax` has its BF16 bits: where
    these are some rows of a tensor.
    """
    master = _weights(master)
    rows, columns = master.shape
    across = columns // group
    if columns % group or scales.numel() != rows * across or codes.numel() * codes.element_size() * 2 != rows * columns:
        raise ValueError("rows must be whole groups, with two codes a byte and a scale for each group")
    codes, scales = codes.view(-1).view(torch.uint8), integers(scales).view(-1)
    served_scale = integers(served_scale).view(-1)
    moved, whole, size = ChangeList(scales.numel(), scales), ChangeList(1, served_scale), GROUP_BLOCK // group
    largest, problems = (torch.zeros(1, dtype=of, device=master.device) for of in (torch.int32, torch.int64))
    if amax is not None:
        largest.fill_(amax << 16)
    elif kind == numbers.NVFP4 and codes.numel():
        _amax[(triton.cdiv(rows * columns, BLOCK),)](master, largest, rows, columns, master.stride(0), SIZE=BLOCK)
    if kind == numbers.NVFP4:
        _refresh_tensor_scale[(1,)](largest, served_scale, whole.total, whole.positions, whole.old, whole.new)

    def launch(found: ChangeList) -> None:
        problems.zero_()
        if codes.numel():
            _refresh_groups[(triton.cdiv(rows * across, size),)](
                master, codes, scales, largest, problems,
                found.total, found.positions, found.old, found.new, found.capacity,
                moved.total, moved.positions, moved.old, moved.new,
                rows * across, across, master.stride(0), KIND=kind, GROUP=group, SIZE=size,
            )  # fmt: skip

    return (
        collect(launch, codes.numel(), codes, expected, writes=True), moved.sorted(), whole.sorted(), int(problems)
    )  # fmt: skip
