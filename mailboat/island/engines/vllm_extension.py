"""Way B inside vLLM's workers: writes absolute values into live parameters and says what that did to their sums.

This one file runs in the engine's environment: it needs torch and nothing of Mailboat. Put the folder that holds the
package `mailboat` on PYTHONPATH, or copy the file, and start vLLM with `--worker-extension-cls
mailboat.island.engines.vllm_extension.MailboatWorker`. Its methods are called through `/collective_rpc`.

It must never touch a parameter before every tensor was mapped and every shape and type agreed: what it can't map
(repacked, emptied, quantised or unknown layouts) it refuses, and the sidecar reloads from the image instead.
Formulas: docs/format/digests.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

PROTOCOL = 1
MAGIC = b"mailboat-stage-1\n"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_PACKED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_DERIVED = ("W_UV", "W_UK_T", "W_UK", "W_V", "W_K")  # attention weights absorbed after loading
_CHUNK = 1 << 20  # words at once in a full scan

Places = tuple[torch.Tensor, torch.Tensor]  # int64: what a word is mixed with, for each of the two sums


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_ROW = (_signed(0x243F6A8885A308D3), _signed(0x082EFA98EC4E6C89))
_WORD = (_signed(0x9E3779B97F4A7C15), _signed(0xA4093822299F31D1))
_FIRST = (_signed(0xBF58476D1CE4E5B9), _signed(0xFF51AFD7ED558CCD))
_SECOND = (_signed(0x94D049BB133111EB), _signed(0xC4CEB9FE1A85EC53))


class Unmapped(Exception):  # noqa: N818 - says what is the matter with it
    """A tensor that has no home here, or not one that can be written in place."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the checkpoint knows it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int
    seeds: tuple[int, int]

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows: all dimensions but the last."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count


@dataclass(frozen=True)
class Slice:
    """Rows [row0, row0 + rows) and columns [column0, column0 + columns) of a tensor lie in `live`, a 2-D integer view.

    `counted`: this rank answers for it; replicas are written but their sums are another rank's.
    """

    live: torch.Tensor
    row0: int
    column0: int
    counted: bool

    @property
    def rows(self) -> int:
        """Rows here."""
        return int(self.live.shape[0])

    @property
    def columns(self) -> int:
        """Columns here."""
        return int(self.live.shape[1])


# --- Mapping ----------------------------------------------------------------------------------------------------------


class Mapping:
    """Where each tensor of an inventory lies in a model. Built without touching anything."""

    def __init__(self, model: Any, specs: list[TensorSpec], aliases: dict[str, str]) -> None:
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        # Layers that every rank has whole know no rank; the others' rank says who answers for them.
        self._rank = next((_tp(module)[0] for module in self._modules.values() if hasattr(module, "tp_rank")), 0)
        self.specs = specs
        for module in self._modules.values():
            if any(getattr(module, name, None) is not None for name in _DERIVED):
                raise Unmapped(f"{type(module).__name__} keeps weights derived from others")
            if _computes_from_a_copy(module):
                raise Unmapped(f"{type(module).__name__} computes from a repacked copy of its weights")
        self.slices = [self._find(spec) for spec in specs]
        by_name = {spec.name: found for spec, found in zip(specs, self.slices, strict=True)}
        for alias, name in aliases.items():
            own = self._find(_renamed(by_name, specs, alias, name))
            if own and by_name[name] and own[0].live.data_ptr() != by_name[name][0].live.data_ptr():
                raise Unmapped(f"{alias} is tied to {name} in the checkpoint, but not in the engine")

    def covered(self) -> list[int]:
        """Elements of each tensor that this rank answers for."""
        return [sum(part.rows * part.columns for part in slices if part.counted) for slices in self.slices]

    def _find(self, spec: TensorSpec) -> list[Slice]:
        """The slices of a tensor on this rank; empty when the module is on another one."""
        path, _, leaf = spec.name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if last in _PACKED:
            packed, shard = _PACKED[last]
            module = self._modules.get(f"{parent}.{packed}")
            if module is not None:
                return self._packed(spec, module, f"{parent}.{packed}.{leaf}", shard)
        if (expert := self._expert(spec, path)) is not None:
            return expert
        live = self._parameters.get(spec.name)
        if live is None:
            return []
        return self._plain(spec, self._modules[path], live, leaf)

    def _packed(self, spec: TensorSpec, module: Any, name: str, shard: str | int) -> list[Slice]:
        live = self._parameters.get(name)
        if live is None:
            raise Unmapped(f"{spec.name} has no parameter in {type(module).__name__}")
        rank, size = _tp(module)
        if isinstance(shard, str):
            head = module.head_size
            head_v = getattr(module, "v_head_size", head)
            query, keys, values = module.num_heads * head, module.num_kv_heads * head, module.num_kv_heads * head_v
            replicas = module.num_kv_head_replicas
            offset = {"q": 0, "k": query, "v": query + keys}[shard]
            rows = {"q": query, "k": keys, "v": values}[shard]
            turn = rank if shard == "q" else rank // replicas
            counted = shard == "q" or rank % replicas == 0
        else:
            sizes = module.output_sizes
            offset, rows = sum(sizes[:shard]) // size, sizes[shard] // size
            turn, counted = rank, True
        flat = _as_2d(spec, live)
        if offset + rows > live.shape[0]:
            raise Unmapped(f"{spec.name} does not fit into {name} of shape {tuple(live.shape)}")
        if live.dim() == 1:  # a bias: one row here, cut by columns
            return _checked(spec, Slice(flat[:, offset : offset + rows], 0, turn * rows, counted), across=size)
        return _checked(spec, Slice(flat[offset : offset + rows], turn * rows, 0, counted), across=size)

    def _expert(self, spec: TensorSpec, path: str) -> list[Slice] | None:
        """`P.experts.E.{gate,up,down}_proj.weight` inside a fused layer's `w13_weight` and `w2_weight`."""
        pieces = path.split(".")
        if len(pieces) < 3 or pieces[-3] != "experts" or not pieces[-2].isdigit():
            return None
        module = self._modules.get(".".join(pieces[:-2]))
        w13, w2 = getattr(module, "w13_weight", None), getattr(module, "w2_weight", None)
        if module is None or w13 is None or w2 is None:
            return None
        rank, size = _tp(module)
        expert = int(pieces[-2])
        chosen = getattr(module, "expert_map", None)
        if chosen is not None:
            expert = int(chosen[expert])
            if expert < 0:
                return []
        if pieces[-1] in {"gate_proj", "w1", "up_proj", "w3"}:
            half = w13.shape[1] // 2
            offset = 0 if pieces[-1] in {"gate_proj", "w1"} else half
            live = _as_2d(spec, w13[expert])[offset : offset + half]
            return _checked(spec, Slice(live, rank * half if size > 1 else 0, 0, counted=True), across=size)
        if pieces[-1] in {"down_proj", "w2"}:
            live = _as_2d(spec, w2[expert])
            return _checked(spec, Slice(live, 0, rank * live.shape[1] if size > 1 else 0, counted=True), across=size)
        return None

    def _plain(self, spec: TensorSpec, module: Any, live: torch.Tensor, leaf: str) -> list[Slice]:
        flat = _as_2d(spec, live)
        rank, size = _tp(module)
        indices = getattr(module, "shard_indices", None)
        if indices is not None:  # a vocabulary's rows, padded
            first, last = indices.org_vocab_start_index, indices.org_vocab_end_index
            return _checked(spec, Slice(flat[: last - first], first, 0, counted=True), across=size)
        kind = {cls.__name__ for cls in type(module).__mro__}
        if size > 1 and "RowParallelLinear" in kind and leaf == "weight":
            return _checked(spec, Slice(flat, 0, rank * flat.shape[1], counted=True), across=size)
        if size > 1 and "ColumnParallelLinear" in kind:
            rows = flat.shape[0] if len(spec.shape) > 1 else flat.shape[1]
            part = Slice(flat, rank * rows, 0, True) if len(spec.shape) > 1 else Slice(flat, 0, rank * rows, True)
            return _checked(spec, part, across=size)
        return _checked(spec, Slice(flat, 0, 0, counted=self._rank == 0), across=1)


def _renamed(by_name: dict[str, Any], specs: list[TensorSpec], alias: str, name: str) -> TensorSpec:
    if name not in by_name:
        raise Unmapped(f"{alias} is an alias of {name}, which the version does not have")
    spec = next(spec for spec in specs if spec.name == name)
    return TensorSpec(alias, spec.dtype, spec.shape, spec.width, spec.seeds)


def _computes_from_a_copy(module: Any) -> bool:
    """vLLM on CPUs may keep the plain weight and compute from a packed one: a closure over something."""
    multiply = getattr(module, "cpu_linear", None)
    return bool(getattr(multiply, "__closure__", None))


def _tp(module: Any) -> tuple[int, int]:
    return int(getattr(module, "tp_rank", 0) or 0), int(getattr(module, "tp_size", 1) or 1)


def _as_2d(spec: TensorSpec, live: torch.Tensor) -> torch.Tensor:
    expected = _DTYPES.get(spec.dtype)
    if expected is None or live.dtype != expected:
        raise Unmapped(f"{spec.name} is {spec.dtype} in the checkpoint and {live.dtype} in the engine")
    data = live.detach()
    if not data.is_contiguous() or data.numel() == 0 or data.device.type == "meta":
        raise Unmapped(f"{spec.name} is repacked, emptied or not contiguous in the engine")
    columns = int(data.shape[-1]) if data.dim() else 1
    return data.reshape(-1, columns).view(_INTEGERS[spec.width])


def _checked(spec: TensorSpec, part: Slice, *, across: int) -> list[Slice]:
    """A slice whose place in the tensor is proven possible; everything else raises Unmapped."""
    if part.row0 + part.rows > spec.rows or part.column0 + part.columns > spec.columns:
        raise Unmapped(f"{spec.name} of shape {spec.shape} does not fit its parameter of {tuple(part.live.shape)}")
    whole = part.rows == spec.rows and part.columns == spec.columns
    if across == 1 and not whole:
        raise Unmapped(f"{spec.name} of shape {spec.shape} has another shape in the engine: {tuple(part.live.shape)}")
    end = part.column0 + part.columns
    if (part.column0 * spec.width) % 8 or ((end * spec.width) % 8 and end != spec.columns):
        raise Unmapped(f"the cut through {spec.name} divides a 64-bit word")
    return [part]


# --- Writing and summing ----------------------------------------------------------------------------------------------


def _mix(x: torch.Tensor, which: int) -> torch.Tensor:
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * _FIRST[which]
    x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    x = x * _SECOND[which]
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _total(words: torch.Tensor, places: Places) -> tuple[int, int]:
    return int(_mix(words ^ places[0], 0).sum()), int(_mix(words ^ places[1], 1).sum())


def _places(spec: TensorSpec, rows: torch.Tensor, words: torch.Tensor) -> Places:
    first, second = (rows * _ROW[which] + words * _WORD[which] + _signed(spec.seeds[which]) for which in (0, 1))
    return first, second


@dataclass
class Job:
    """The changes of one slice, ready to be written: places in flat memory, values, and the words that they touch."""

    index: int
    flat: torch.Tensor
    at: torch.Tensor
    values: torch.Tensor
    touched: Touched
    counted: bool


class Touched(Protocol):
    """How the words that changes touch are read from live memory."""

    def words(self) -> torch.Tensor:
        """The words as they are now, int64."""


@dataclass
class WholeWords:
    """Rows of whole 64-bit words: live memory is read as such."""

    live: torch.Tensor
    at: torch.Tensor

    def words(self) -> torch.Tensor:
        """One look at each."""
        return self.live[self.at]


@dataclass
class Elements:
    """Rows that end within a word, or memory that begins within one: words are put together of elements."""

    flat: torch.Tensor
    gather: torch.Tensor
    inside: torch.Tensor
    width: int

    def words(self) -> torch.Tensor:
        """Padded with zeros at the end of a row."""
        bits = self.width * 8
        pieces = self.flat[self.gather].to(torch.int64)
        if self.width < 8:
            pieces = pieces & ((1 << bits) - 1)
        pieces = pieces * self.inside
        shifts = torch.arange(0, 64, bits, device=pieces.device, dtype=torch.int64)
        return (pieces << shifts).sum(1)


@dataclass
class Stage:
    """An overlay mapped onto this rank's parameters, with all that can be worked out before the engine stands still."""

    number: int
    jobs: list[Job]
    places: Places  # of the touched words of all jobs, one job after the other
    owner: torch.Tensor  # the job of each of them

    @classmethod
    def of(cls, number: int, found: list[tuple[Job, Places]]) -> Stage:
        """Joins the jobs' words."""
        jobs = [job for job, _ in found]
        if not found:
            return cls(number, jobs, (torch.empty(0), torch.empty(0)), torch.empty(0))
        counts = torch.tensor([len(places[0]) for _, places in found])
        first, second = (torch.cat([places[which] for _, places in found]) for which in (0, 1))
        owner = torch.repeat_interleave(torch.arange(len(jobs)), counts).to(first.device)
        return cls(number, jobs, (first, second), owner)

    @property
    def changed(self) -> int:
        """Elements that this rank answers for."""
        return sum(len(job.at) for job in self.jobs if job.counted)


def write(stage: Stage) -> list[tuple[int, int]]:
    """Reads the old words back, writes, reads the new ones; the difference that each job made to the two sums.

    The engine stands still meanwhile, so what can be is done for all jobs at once.
    """
    jobs = stage.jobs
    if not jobs:
        return []
    before = torch.cat([job.touched.words() for job in jobs])
    for job in jobs:
        job.flat[job.at] = job.values
    after = torch.cat([job.touched.words() for job in jobs])
    made = []
    for which, places in enumerate(stage.places):
        change = _mix(after ^ places, which) - _mix(before ^ places, which)
        total = torch.zeros(len(jobs), dtype=torch.int64, device=change.device)
        made.append(total.index_add_(0, stage.owner, change).tolist())
    return list(zip(*made, strict=True))


def job_of(
    index: int, spec: TensorSpec, part: Slice, at: torch.Tensor, values: torch.Tensor
) -> tuple[Job, Places] | None:
    """The changes at elements `at` (ascending, counted in the whole tensor) that fall into a slice, and the places of
    the words that they touch.
    """
    rows, columns = at // spec.columns - part.row0, at % spec.columns - part.column0
    here = (rows >= 0) & (rows < part.rows) & (columns >= 0) & (columns < part.columns)
    rows, columns, values = rows[here], columns[here], values[here]
    if not len(rows):
        return None
    per = 8 // spec.width
    words_of_row = -(-part.columns // per)
    word = torch.unique(rows * words_of_row + columns // per)
    word_row, word_column = word // words_of_row, word % words_of_row
    flat = part.live.reshape(-1)
    device = flat.device
    touched: Touched
    if part.columns % per == 0 and flat.storage_offset() % per == 0:
        touched = WholeWords(flat.view(torch.int64), word.to(device))
    else:
        column = word_column[:, None] * per + torch.arange(per, dtype=torch.int64)
        inside = column < part.columns
        gather = word_row[:, None] * part.columns + column.clamp(max=part.columns - 1)
        touched = Elements(flat, gather.to(device), inside.to(torch.int64).to(device), spec.width)
    places = _places(spec, word_row + part.row0, word_column + part.column0 // per)
    job = Job(
        index, flat, (rows * part.columns + columns).to(device), values.to(device), touched, part.counted
    )  # fmt: skip
    return job, (places[0].to(device), places[1].to(device))


def live_sums(spec: TensorSpec, part: Slice) -> tuple[int, int]:
    """The sums of a slice, read from live memory."""
    per = 8 // spec.width
    words = -(-part.columns // per)
    step = max(1, _CHUNK // words)
    first = second = 0
    device = part.live.device
    columns = torch.arange(words, dtype=torch.int64, device=device) + part.column0 // per
    for row in range(0, part.rows, step):
        block = part.live[row : row + step]
        if part.columns % per:
            block = torch.nn.functional.pad(block, (0, words * per - part.columns))
        data = block.contiguous().view(torch.int64) if spec.width < 8 else block
        rows = torch.arange(row, row + len(block), dtype=torch.int64, device=device) + part.row0
        a, b = _total(data, _places(spec, rows[:, None], columns[None, :]))
        first, second = first + a, second + b
    return first, second


# --- What the sidecar sends -------------------------------------------------------------------------------------------


def read_specs(folder: str) -> tuple[list[TensorSpec], dict[str, str]]:
    """The inventory that the sidecar wrote as `inventory.json`."""
    body = json.loads((Path(folder) / "inventory.json").read_bytes())
    specs = [
        TensorSpec(item["name"], item["dtype"], tuple(item["shape"]), item["width"], tuple(item["seeds"]))
        for item in body["tensors"]
    ]
    return specs, dict(body["aliases"])


def read_changes(path: str, specs: list[TensorSpec]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Tensor index, element positions (int64) and new elements (integers), from a file of the sidecar."""
    data = bytearray(Path(path).read_bytes())
    if data[: len(MAGIC)] != MAGIC:
        raise Unmapped(f"{path} is no staged overlay")
    at = -(-len(MAGIC) // 8) * 8
    while at < len(data):
        index, count = struct.unpack_from("<QQ", data, at)
        at += 16
        width = specs[index].width
        where = torch.frombuffer(data, dtype=torch.int64, count=count, offset=at)
        at += count * 8
        values = torch.frombuffer(data, dtype=torch.uint8, count=count * width, offset=at)
        at += -(-count * width // 8) * 8
        yield index, where, values.clone().view(_INTEGERS[width])


class MailboatWorker:
    """Mixed into vLLM's worker: every method is one collective call and answers a JSON object."""

    _mailboat: Mapping | None = None
    _mailboat_stage: Stage | None = None

    def mailboat_hello(self) -> dict[str, Any]:
        """Whether the extension is here."""
        return {"mailboat": PROTOCOL}

    def mailboat_repack(self) -> dict[str, Any]:
        """After a reload: vLLM on CPUs leaves the packed copy of a tied head as it was; makes such copies again."""
        packed = [
            module
            for module in _model(self).modules()
            if _computes_from_a_copy(module) and module.weight.dim() == 2 and module.weight.numel()
        ]
        if packed:
            from vllm.model_executor.layers.utils import (  # type: ignore[import-not-found, unused-ignore]
                dispatch_cpu_unquantized_gemm,
            )

            for module in packed:
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        return {"repacked": len(packed)}

    def mailboat_open(self, folder: str) -> dict[str, Any]:
        """Maps an inventory; `covered` elements per tensor that this rank answers for, or why it can't."""
        self._mailboat_stage = None
        try:
            specs, aliases = read_specs(folder)
            self._mailboat = Mapping(_model(self), specs, aliases)
        except (Unmapped, AttributeError, KeyError, IndexError, RuntimeError) as problem:
            self._mailboat = None
            return {"refused": str(problem)}
        return {"covered": self._mailboat.covered()}

    def mailboat_stage(self, path: str, number: int) -> dict[str, Any]:
        """Maps an overlay; nothing is touched. `changed`: elements that this rank answers for."""
        mapping = self._mailboat
        if mapping is None:
            return {"refused": "no inventory is open"}
        found = [
            job_of(index, mapping.specs[index], part, where, values)
            for index, where, values in read_changes(path, mapping.specs)
            for part in mapping.slices[index]
        ]
        stage = self._mailboat_stage = Stage.of(number, [one for one in found if one is not None])
        return {"changed": stage.changed}

    def mailboat_write(self, number: int) -> dict[str, Any]:
        """Writes the staged overlay; `sums`: [tensor, change of a, change of b], modulo 2^64."""
        stage = self._mailboat_stage
        if stage is None or stage.number != number:
            return {"refused": "another overlay is staged"}
        with torch.no_grad():
            made = zip(stage.jobs, write(stage), strict=True)
        _synchronise(self)
        mask = (1 << 64) - 1
        return {"sums": [[job.index, str(a & mask), str(b & mask)] for job, (a, b) in made if job.counted]}

    def mailboat_drop(self) -> dict[str, Any]:
        """Gives the staged overlay's memory back."""
        self._mailboat_stage = None
        return {}

    def mailboat_sums(self) -> dict[str, Any]:
        """The sums of everything live that this rank answers for: [tensor, a, b]."""
        mapping = self._mailboat
        if mapping is None:
            return {"refused": "no inventory is open"}
        mask = (1 << 64) - 1
        found = []
        for index, (spec, slices) in enumerate(zip(mapping.specs, mapping.slices, strict=True)):
            for part in slices:
                if part.counted:
                    a, b = live_sums(spec, part)
                    found.append([index, str(a & mask), str(b & mask)])
        return {"sums": found}


def _model(worker: Any) -> Any:
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def _synchronise(worker: Any) -> None:
    device = getattr(worker, "device", None)
    if device is not None and getattr(device, "type", "cpu") == "cuda":
        torch.cuda.synchronize(device)
