"""Compile every kernel for a real architecture (sm_90), without a GPU; run by test_compiles in a process of its own.

The interpreter forgives types that the compiler does not. Prints one line per kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import changes, decode, numbers, refresh, sums

TARGET = GPUTarget("cuda", 90, 32)
LIST = {"total": "*i64", "positions": "*i64"}
POINTERS = "words", "blocks", "owners", "tiles", "found", "transitions", "entries", "positions", "literals_to", "status"
DECODING = dict.fromkeys(POINTERS, "*i64")
SCALES = {"scale_total": "*i64", "scale_positions": "*i64"}


WIDTHS = {"u8": 1, "i16": 2, "i32": 4, "i64": 8}
# What would let two GPUs, or a GPU and a CPU, round differently.
LOOSE = ("fma.rn.f32", "div.full", "div.approx", "rcp.approx", ".ftz")


def variants(
    widths: Sequence[str], masters: Sequence[str], layouts: Sequence[bool]
) -> list[tuple[object, dict[str, str], dict[str, object]]]:
    """(kernel, types of the arguments that are no i64, constants)."""
    found: list[tuple[object, dict[str, str], dict[str, object]]] = []
    for kind in widths:
        pair = dict.fromkeys(("old_ptr", "new_ptr", "olds", "news"), f"*{kind}")
        for dense in layouts:
            found.append((changes._diff, LIST | pair, {"CONTIGUOUS": dense, "SIZE": changes.BLOCK}))
        scatter = {"out": f"*{kind}", "positions": "*i64", "values": f"*{kind}"}
        found.append((changes._scatter, scatter, {"SIZE": changes.BLOCK}))
        width = WIDTHS[kind]
        of_sums = {"data": f"*{kind}", "sums": "*i64", "seeds": "*i64"}
        found.append((sums._tensor_sums, of_sums, {"UNIT": width, "SIZE": sums.BLOCK}))
        applied = of_sums | {"positions": "*i64", "values": f"*{kind}"}
        found.append((sums._apply_with_sums, applied, {"WIDTH": width, "SIZE": sums.BLOCK}))
        made = DECODING | {"old_ptr": f"*{kind}", "literals": f"*{kind}", "news": f"*{kind}", "values": "*u8"}
        for order in (numbers.UNSIGNED, numbers.SIGNED, numbers.FLOAT):
            found.append((decode._elements, made, {"ORDER": order, "WIDTH": width, "TILE": decode.TILE}))
    for states in (1, 8, 32):
        walked = {"STATES": states}
        found.append((decode._transitions, DECODING, walked | {"LANES": decode.LANES}))
        found.append((decode._entries, DECODING, walked | {"WALKS": decode.WALKS}))
    found.append((decode._positions, DECODING, {"WALKS": decode.WALKS}))
    for master in masters:
        codes = LIST | {"master": master, "codes": "*u8", "olds": "*u8", "news": "*u8", "problems": "*i64"}
        fp8 = codes | SCALES | {"scales": "*i32", "scale_olds": "*i32", "scale_news": "*i32"}
        found.append((refresh._refresh_fp8_block, fp8, {"HEIGHT": 128, "WIDTH": 128}))
        found.append((refresh._refresh_fp8_row, fp8, {"SIZE": refresh.ROW_BLOCK}))
        for kind, group in ((numbers.NVFP4, 16), (numbers.MXFP4, 32), (numbers.INT4, 64)):
            scale = "*i16" if kind == numbers.INT4 else "*u8"
            grouped = codes | SCALES | {"scales": scale, "scale_olds": scale, "scale_news": scale, "largest": "*i32"}
            found.append(
                (refresh._refresh_groups, grouped, {"KIND": kind, "GROUP": group, "SIZE": refresh.GROUP_BLOCK // group})
            )
        found.append((refresh._amax, {"master": master, "largest": "*i32"}, {"SIZE": refresh.BLOCK}))
    for dense in layouts:
        bf16 = LIST | {"master": "*i32", "served": "*i16", "olds": "*i16", "news": "*i16"}
        for fp16 in (False, True):
            constants = {"FP16": fp16, "CONTIGUOUS": dense, "SIZE": refresh.BLOCK}
            found.append((refresh._refresh_cast, bf16, constants))
    whole = LIST | {"largest": "*i32", "served": "*i32", "olds": "*i32", "news": "*i32"}
    found.append((refresh._refresh_tensor_scale, whole, {}))
    return found


def main() -> None:
    """Compile the common variants, or with --all every width."""
    every = "--all" in sys.argv
    chosen = (list(WIDTHS), ["*i32", "*i16"], [True, False]) if every else (["i16"], ["*i32"], [False])
    for kernel, types, constants in variants(*chosen):
        name = kernel.__name__  # type: ignore[attr-defined]
        signature = {
            argument: "constexpr" if argument in constants else types.get(argument, "i64")
            for argument in kernel.arg_names  # type: ignore[attr-defined]
        }
        compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=TARGET)
        loose = [word for word in LOOSE if word in compiled.asm["ptx"]]
        if loose:
            sys.exit(f"{name} {constants} rounds loosely: {', '.join(loose)}")
        print(name, constants, flush=True)


if __name__ == "__main__":
    main()
