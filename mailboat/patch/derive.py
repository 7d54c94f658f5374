"""Patches made from patches: several steps merged into one, and a step reversed.

The other end is worked out window by window from the base and what the patches change, and encoded like any state: so
the result is byte for byte the patch that would be built between the two ends, from one pass over the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mailboat.checkpoint.source import TensorSource
from mailboat.digest import State, measure
from mailboat.durable import disk_full_as_error
from mailboat.errors import DigestMismatch, PatchError, WrongBase
from mailboat.patch.build import BuiltPatch, PartSpec, build_patch
from mailboat.patch.chain import Chain
from mailboat.patch.container import PatchFile
from mailboat.patch.encoder import EncodeFor
from mailboat.patch.scratch import thread_count


def merge_patches(
    base: TensorSource,
    patches: Sequence[Sequence[Path]],
    out: Path,
    *,
    base_state: State | None = None,
    target: State | None = None,
    part: PartSpec | None = None,
    encode_for: EncodeFor = "size",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> BuiltPatch:
    """Write the one patch that does what `patches` (each a list of its parts) do one after the other to `base`.

    The last value of an element wins, and elements that return to their old bits drop out. `base` is a checkpoint, an
    image or any other source; with `base_state`, its proven digests, it is read but not digested again. With `target`
    the result is compared with that state, sums and all, else with the digest that the last patch promises: nothing is
    written unless both ends are right. Memory: at most 128 MiB per thread and the tables of the patches, whatever the
    size of the model; what the patches change lies in an unlinked file beside `out`.
    `part`, `encode_for`, `threads`, `progress` as in `build_patch`. Raises WrongBase, PatchError, UnknownCodec,
    InventoryMismatch, DigestMismatch, CheckpointError, CheckpointChanged, DiskFull; `out` then is as it was.
    """
    with ExitStack() as stack:
        chain = _chain(base, patches, out, thread_count(threads), stack)
        if base_state is not None:
            _require_base(chain, base_state.digest)
        if target is not None and target.digest != chain.to_digest:
            raise _mismatch(chain.to_digest, target.digest)

        def approve(before: State, after: State) -> None:
            _require_base(chain, before.digest)
            _require_end(chain, after)
            if target is not None and (after.sums != target.sums).any():
                raise DigestMismatch("The patches do not lead to the sums that were promised; fetch them again.")

        with _told_of_another_base(chain, base, threads):
            return build_patch(
                base, chain, out, base_state=base_state, threads=threads, progress=progress, part=part,
                encode_for=encode_for, approve=approve,
            )  # fmt: skip


def reverse_patch(base: TensorSource, parts: Sequence[Path], out: Path, *, threads: int | None = None) -> BuiltPatch:
    """Write the patch that leads back to `base`, which the patch of these `parts` starts from.

    Memory and errors as with `merge_patches`.
    """
    with ExitStack() as stack:
        chain = _chain(base, [parts], out, thread_count(threads), stack)

        def approve(before: State, after: State) -> None:
            _require_base(chain, after.digest)
            _require_end(chain, before)

        with _told_of_another_base(chain, base, threads):
            return build_patch(chain, base, out, threads=threads, approve=approve)


def patches_of(paths: Sequence[Path]) -> list[list[Path]]:
    """Parts as they stand in a row, those of one patch together. Raises PatchError, UnknownCodec."""
    found: list[list[Path]] = []
    ends, seen = ("", ""), set[int]()
    for path in paths:
        with PatchFile.open(path) as part:
            if (part.from_digest, part.to_digest) != ends or part.part in seen:
                found.append([])
                ends, seen = (part.from_digest, part.to_digest), set()
            seen.add(part.part)
        found[-1].append(path)
    return found


def _chain(base: TensorSource, patches: Sequence[Sequence[Path]], out: Path, threads: int, stack: ExitStack) -> Chain:
    folder = out.absolute().parent
    stack.enter_context(disk_full_as_error(folder))
    return Chain.open(base, patches, folder, threads, stack)


@contextmanager
def _told_of_another_base(chain: Chain, base: TensorSource, threads: int | None) -> Iterator[None]:
    """Against other bytes than it was made for, a sound patch looks damaged: then say so."""
    try:
        yield
    except PatchError:
        _require_base(chain, measure(base, threads=threads).digest)
        raise


def _require_base(chain: Chain, held: str) -> None:
    if held != chain.from_digest:
        raise WrongBase(
            f"A patch starts from the state {chain.from_digest[:16]}, but what lies before it is {held[:16]}; "
            "give the patches in order, and the base of the first one."
        )


def _require_end(chain: Chain, reached: State) -> None:
    if reached.digest != chain.to_digest:
        raise _mismatch(reached.digest, chain.to_digest)


def _mismatch(got: str, promised: str) -> DigestMismatch:
    return DigestMismatch(
        f"The patches lead to the state {got[:16]}, not to {promised[:16]} as they say; fetch them again."
    )
