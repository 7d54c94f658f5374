"""Which tensors a version changed, and how much: the columns of its statistics beside the names of its inventory.

An inventory may list half a million tensors, so its document is scanned row by row and never becomes objects; only the
rows that are shown and sums per layer are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

import numpy as np

from controlplane.registry import blobs
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Version
from mailboat.errors import PatchError
from mailboat.patch.statistics import Statistics, names

PAGE = 50
LAYERS = 400
ORDERS = {"changed": "most elements changed", "bytes": "most bytes", "name": "by name"}
_TEXT = rb'"((?:[^"\\]|\\.)*)"'
_ROW = re.compile(rb"\[" + _TEXT + rb"," + _TEXT + rb',"(\w+)",\[([\d,]*)\],(?:null|' + _TEXT + rb")(?:,\d+)?\]")
_COLLECTED = "Retention has removed them with the patch; the version's own numbers stay."
_NUMBER = re.compile(r"(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Named:
    """A row of an inventory: its place, name, dtype and shape."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def shape_words(self) -> str:
        """The shape for people."""
        return " \N{MULTIPLICATION SIGN} ".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor with what the patch did to it."""

    tensor: Named
    changed: int
    unit_steps: int
    bytes: int
    encodings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """All tensors of a layer. `share` is its part of the patch's bytes in per cent of the largest layer's."""

    name: str
    tensors: int
    elements: int
    changed: int
    bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class TensorTable:
    """A page of tensors and the sums per layer. `touched`: tensors in which something changed."""

    rows: tuple[TensorRow, ...]
    layers: tuple[LayerRow, ...]
    total: int
    touched: int
    pages: int
    page: int


def scan(document: bytes) -> Iterator[Named]:
    """The rows of a canonical inventory document, one at a time."""
    begin = document.index(b'"tensors":[')
    for index, match in enumerate(_ROW.finditer(document, begin)):
        shape = tuple(int(size) for size in match[4].split(b",") if size)
        yield Named(index, _text(match[2]), match[3].decode(), shape)


def layer_of(name: str) -> str:
    """What a tensor belongs to: its name up to the first number, or up to its last dot."""
    match = _NUMBER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


class Absent(Exception):  # noqa: N818 - nothing went wrong
    """There are no statistics to show; it says why, in one sentence."""


def table(version: Version, order: str, page: int) -> TensorTable:
    """The page of tensors that is asked for. Raises Absent."""
    if version.statistics is None or version.inventory is None:
        raise Absent(_absence(version))
    try:
        return _table(version, version.statistics.sha256, version.inventory.sha256, order, page)
    except Missing:  # the collection was quicker than this page
        raise Absent(_COLLECTED) from None
    except (PatchError, Refusal) as error:  # of another build, or damaged in the store
        raise Absent(str(error)) from None


def _absence(version: Version) -> str:
    if version.state == Version.State.RETIRED:
        return _COLLECTED
    if version.state == Version.State.FAILED:
        return "They are made when a patch is validated, and this version failed."
    if version.state != Version.State.READY:
        return "They are made of a patch when it is validated; this version is not ready yet."
    return "They are made of a patch when it is validated; an anchor without a patch has none."


def _table(version: Version, statistics: str, inventory: str, order: str, page: int) -> TensorTable:
    found = Statistics.from_bytes(blobs.store().read(version.run_id, statistics))
    count = len(found.changed)
    if order == "name":
        places = np.arange(count)
    else:
        column = found.sizes if order == "bytes" else found.changed
        places = np.argsort(column, kind="stable")[::-1]
    pages = max(1, -(-count // PAGE))
    page = min(max(1, page), pages)
    wanted = [int(place) for place in places[(page - 1) * PAGE : page * PAGE]]
    by_place: dict[int, Named] = {}
    keep = set(wanted)
    document = blobs.store().read(version.run_id, inventory)
    for row in scan(document):
        if row.index in keep:
            by_place[row.index] = row
    rows = tuple(
        TensorRow(
            by_place[place],
            int(found.changed[place]),
            int(found.unit_steps[place]),
            int(found.sizes[place]),
            names(int(found.encodings[place])),
        )
        for place in wanted
        if place in by_place
    )
    return TensorTable(
        rows=rows,
        layers=_layers(version.run_id, inventory, statistics),
        total=count,
        touched=int(np.count_nonzero(found.encodings)),
        pages=pages,
        page=page,
    )


@lru_cache(64)
def _layers(run: UUID, inventory: str, statistics: str) -> tuple[LayerRow, ...]:
    """Sums per layer, in the model's order. Blobs never change, so that the answer never does either."""
    found = Statistics.from_bytes(blobs.store().read(run, statistics))
    sums: dict[str, list[int]] = {}
    for row in scan(blobs.store().read(run, inventory)):
        layer = sums.setdefault(layer_of(row.name), [0, 0, 0, 0])
        layer[0] += 1
        layer[1] += row.elements
        layer[2] += int(found.changed[row.index])
        layer[3] += int(found.sizes[row.index])
    most = max((layer[3] for layer in sums.values()), default=0)
    ordered = sorted(sums.items(), key=lambda item: _natural(item[0]))
    return tuple(
        LayerRow(name, layer[0], layer[1], layer[2], layer[3], 100 * layer[3] / most if most else 0.0)
        for name, layer in ordered[:LAYERS]
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _text(raw: bytes) -> str:
    found: str = json.loads(b'"' + raw + b'"')
    return found
