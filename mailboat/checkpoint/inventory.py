"""The inventory: which tensors a state has, in which order, and which of them belong together.

It says nothing about where bytes lie or what they are.  Two checkpoints of one model give the same inventory whatever
their shards, so its digest decides whether a patch can join them.  Formats: docs/format/inventory.md.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mailboat import canonical
from mailboat.errors import CheckpointError, InventoryMismatch, listed

FORMAT = "mailboat-inventory-1"
COMPONENT = "target"
MAX_BYTES = 1 << 28
MAX_NBYTES = 2**62
_ROW_FIELDS = 5

# Bits per element of the dtypes that safetensors names.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F32": 32, "I32": 32, "U32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor, or None when the dtype isn't known.

    Raises ValueError when the size isn't a whole number of bytes or overflows 2^62 bytes.
    """
    elements = 0 if 0 in shape else 1
    for size in shape if elements else ():
        elements *= size
        if elements > MAX_NBYTES:
            raise ValueError("its shape overflows")
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    nbytes, rest = divmod(elements * bits, 8)
    if rest:
        raise ValueError("its elements do not fill whole bytes")
    if nbytes > MAX_NBYTES:
        raise ValueError("its shape overflows")
    return nbytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of an inventory.

    `dtype` is a safetensors name, `unit` groups codes with their scales (they are applied together or not at all),
    `stored` is the size in bytes where the dtype is unknown to format 1 and None otherwise.
    """

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: str | None = None
    stored: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        if self.stored is not None:
            return self.stored
        return 0 if 0 in self.shape else prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def width(self) -> int:
        """Bytes of one coding element: 1, 2, 4 or 8; packed and unknown dtypes are coded as bytes."""
        return max(1, DTYPE_BITS.get(self.dtype, 8) // 8)

    @property
    def elements(self) -> int:
        """Coding elements: nbytes / width."""
        return self.nbytes // self.width

    @property
    def rows(self) -> int:
        """Rows (all dimensions but the last); 1 where rows would not be whole bytes; 0 for a tensor without bytes."""
        return self._geometry()[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; rows * row_bytes == nbytes."""
        return self._geometry()[1]

    def _geometry(self) -> tuple[int, int]:
        nbytes = self.nbytes
        if nbytes == 0:
            return 0, 0
        rows = prod(self.shape[:-1]) if self.shape and 0 not in self.shape else 1
        return (rows, nbytes // rows) if nbytes % rows == 0 else (1, nbytes)

    @property
    def key(self) -> tuple[str, str]:
        """Component and name: the sort order (code point order is UTF-8 byte order)."""
        return self.component, self.name


@dataclass(frozen=True, eq=False)
class Inventory:
    """The tensors of a state, sorted by (component, UTF-8 name), with declared aliases and the quantiser's identity.

    `aliases` maps a name that is not stored to the name that holds its bytes.
    """

    tensors: tuple[Tensor, ...]
    aliases: Mapping[str, str]
    quantiser: str | None = None

    @classmethod
    def of(cls, tensors: Iterable[Tensor], aliases: Mapping[str, str], quantiser: str | None = None) -> Inventory:
        """Sort `tensors` and check them; raise CheckpointError when names collide or an alias points nowhere."""
        inventory = cls(tuple(sorted(tensors, key=lambda tensor: tensor.key)), dict(aliases), quantiser)
        inventory._check()
        return inventory

    def _check(self) -> None:
        for before, after in zip(self.tensors, self.tensors[1:], strict=False):
            if before.key >= after.key:
                raise CheckpointError(f"The inventory lists {after.name} twice or out of order.")
        names = {tensor.name for tensor in self.tensors}
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise CheckpointError(f"The alias {alias} of {name} does not fit the inventory's tensors.")

    def to_bytes(self) -> bytes:
        """Return the canonical JSON that `digest` is taken of."""
        rows = [
            [t.component, t.name, t.dtype, t.shape, t.unit] + ([] if t.stored is None else [t.stored])
            for t in self.tensors
        ]
        return canonical.encode(
            {"aliases": dict(self.aliases), "format": FORMAT, "quantiser": self.quantiser, "tensors": rows}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Inventory:
        """Parse canonical bytes strictly; raise CheckpointError for anything else."""
        document = canonical.decode(data, what="The inventory", error=CheckpointError, max_bytes=MAX_BYTES, max_depth=4)
        try:
            if document.keys() != {"aliases", "format", "quantiser", "tensors"} or document["format"] != FORMAT:
                raise ValueError("its fields are not those of mailboat-inventory-1")
            aliases, quantiser = document["aliases"], document["quantiser"]
            if not all(isinstance(name, str) for name in aliases.values()):
                raise ValueError("an alias is not a name")
            if not (quantiser is None or isinstance(quantiser, str)):
                raise ValueError("the quantiser is not text")
            tensors = tuple(tensor_of_row(row) for row in document["tensors"])
        except (ValueError, TypeError, AttributeError) as problem:
            raise CheckpointError(f"The inventory is not valid: {problem}.") from None
        inventory = cls(tensors, aliases, quantiser)
        inventory._check()
        return inventory

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_bytes()`, 64 hex digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def elements(self) -> int:
        """Coding elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    def index(self, name: str, component: str = COMPONENT) -> int:
        """Return the position of a tensor, following aliases; raise KeyError when it isn't here."""
        key = component, self.aliases.get(name, name)
        at = bisect_left(self.tensors, key, key=lambda tensor: tensor.key)
        if at == len(self.tensors) or self.tensors[at].key != key:
            raise KeyError(name)
        return at

    def require_same(self, other: Inventory) -> None:
        """Raise InventoryMismatch naming the tensors in which `other` differs from this inventory."""
        if self.digest == other.digest:
            return
        mine = {tensor.key: tensor for tensor in self.tensors}
        theirs = {tensor.key: tensor for tensor in other.tensors}
        groups = {
            "missing": [key[1] for key in mine if key not in theirs],
            "extra": [key[1] for key in theirs if key not in mine],
            "of another dtype, shape or unit": [k[1] for k, t in mine.items() if k in theirs and theirs[k] != t],
        }
        said = "; ".join(f"{kind}: {listed(names)}" for kind, names in groups.items() if names)
        concerned = [name for names in groups.values() for name in names]
        if not said:
            said = "aliases or quantiser differ"
            concerned = sorted({name for name, _ in set(self.aliases.items()) ^ set(other.aliases.items())})
        raise InventoryMismatch(
            f"The tensors do not match ({said}); publish the same tensors or start a new run.", concerned
        )


def tensor_of_row(row: Any) -> Tensor:
    """Check one row of an inventory document and return its tensor, or raise ValueError."""
    if not isinstance(row, list) or len(row) not in {_ROW_FIELDS, _ROW_FIELDS + 1}:
        raise ValueError("a tensor's row is not of the right length")
    component, name, dtype, shape, unit, *rest = row
    if not all(isinstance(text, str) for text in (component, name, dtype)) or not isinstance(unit, str | None):
        raise ValueError("a tensor's component, name, dtype or unit is not text")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape of {name} is not a list of sizes")
    known = tensor_nbytes(dtype, tuple(shape))
    stored = rest[0] if rest else None
    if (known is None) != (type(stored) is int and 0 <= stored <= MAX_NBYTES):
        raise ValueError(f"the size of {name} does not fit its dtype")
    return Tensor(component, name, dtype, tuple(shape), unit, stored)
