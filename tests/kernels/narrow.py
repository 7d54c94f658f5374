"""Look for sizes that a kernel counts with in 32 bits; run by test_compiles in a process of its own, without a GPU.

A launch gives sizes below 2^31 as 32 bits, and the number of a program always; sums and products of them may need more.
Exits with the operations that would overflow. What loops add up, and what atomics do in memory, is not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend

from tests.kernels.compile_all import TARGET, WIDTHS, variants

GROWS = re.compile(r"arith\.(addi|subi|muli|shli)")
SIZE = re.compile(r"(%\w+): i32\b")
# What has the size of an operand, or less: shapes, quotients, the smaller of two.
PASSES = re.compile(r"tt\.(splat|broadcast|expand_dims|reshape)|arith\.(divsi|remsi|minsi|maxsi|select)")
LOOP = re.compile(r"scf\.for (%\w+) = .* step (%\w+)")
NARROW = re.compile(r"(:|->) (tensor<[\dx]*x)?i32>?( \{)?$")


def representation(kernel: Any, types: dict[str, str], constants: dict[str, object]) -> str:
    """Triton's own representation of a kernel whose sizes are below 2^31."""
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in kernel.arg_names}
    source, backend, context = ASTSource(kernel, signature, constants), make_backend(TARGET), ir.context()
    stages: dict[str, Any] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    backend.add_stages(stages, options, source.language)
    helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(TARGET, options, *helpers, context), {}))


def overflows(lines: str) -> Iterator[str]:
    """Sums and products in 32 bits of sizes and of numbers of programs and loops; loops in them that step too far."""
    sizes: set[str] = set()
    for given in lines.splitlines():
        line = given.partition(" loc(")[0].strip()
        name, _, operation = line.partition(" = ")
        if line.startswith("tt.func"):
            sizes.update(SIZE.findall(given))
        elif not NARROW.search(line):
            continue
        elif loop := LOOP.search(line):
            sizes.add(loop[1])
            if not loop[2].startswith("%c1_"):
                yield line
        elif "tt.get_program_id" in line:
            sizes.add(name)
        elif sizes.intersection(re.findall(r"%\w+", operation)):
            if PASSES.match(operation):
                sizes.add(name)
            elif GROWS.match(operation):
                sizes.add(name)
                yield line


def main() -> None:
    """Look at every variant."""
    count = 0
    for kernel, types, constants in variants(list(WIDTHS), ["*i32", "*i16"], [True, False]):
        found = list(overflows(representation(kernel, types, constants)))
        if found:
            sys.exit(f"{kernel.__name__} {constants} counts in 32 bits:\n" + "\n".join(found))  # type: ignore[attr-defined]
        count += 1
    print(count, "kernels count in 64 bits")


if __name__ == "__main__":
    main()
