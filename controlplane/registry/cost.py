"""What a route costs an island in seconds: bytes over its link, then decoding and proving on its cores.

The rates are bytes of the model per second on one core (docs/adr/routes-by-seconds.md). They decide only between
routes: what every route pays alike (the commit, the scan after it) counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

DEFAULT_LINK = 12_500_000.0  # bytes per second, of an island that nobody has measured: 100 Mbit/s
DEFAULT_CORES = 4
MORE_CORES = 0.7  # what each core after the first adds: all of them share the memory's bandwidth
CONTEXTUAL = 5.0e9  # scans the base whole: positions are coded given the old weights
POSITIONAL = 12.0e9
XOR = 2.0e9
DENSE = 2.5e9  # every byte is read, written and summed
STRONG = 1.7e9  # BLAKE3 over the result, where the publisher did not sign the bytes
COPY = 1.2e9  # an anchor's bytes, twice: from download to base, from base to image
SHIPPED, SHIPPED_IN_CONTEXT = 32e-9, 80e-9  # seconds per changed element on one core: position, bytes, sums
STEP = 0.03  # seconds per step: manifest, digests and parts are calls of their own
RATES = {"contextual": CONTEXTUAL, "positional": POSITIONAL, "dense": DENSE}


class Applied(Protocol):
    """A patch that was applied."""

    @property
    def codecs(self) -> str:
        """Separated by commas."""

    @property
    def changed(self) -> int | None:
        """Elements."""


@dataclass(frozen=True, slots=True)
class Means:
    """What an island travels with. `codecs` None: every one that there is. `speed` is how many times as fast as one
    core of the measurements it decodes and proves; `quick`, where it is known, the same for patches that have nothing
    contextual: memory and cores need not be alike in both.
    """

    link: float = DEFAULT_LINK
    speed: float = 1.0
    codecs: frozenset[str] | None = None
    quick: float | None = None

    @classmethod
    def of(
        cls,
        *,
        link: float | None = None,
        cores: int | None = None,
        codecs: Iterable[str] | None = None,
        apply: float | None = None,
        quick: float | None = None,
    ) -> Means:
        """From what is known of it. `apply` and `quick`, from `apply_speed` of its own updates by patches with
        contextual blocks and without, say more than the number of its cores.
        """
        nominal = 1.0 + MORE_CORES * (max(1, cores or DEFAULT_CORES) - 1)

        def times(found: float) -> float:
            return max(0.05, min(found / CONTEXTUAL, 4 * nominal))

        told = apply or quick
        return cls(
            link=float(max(1, link)) if link else DEFAULT_LINK,
            speed=times(told) if told else nominal,
            codecs=None if codecs is None else frozenset(codecs),
            quick=times(quick) if quick else None,
        )

    def knows(self, codecs: str) -> bool:
        """Whether it can decode a patch with these codecs (separated by commas; empty: not known)."""
        return self.codecs is None or not codecs or self.codecs.issuperset(codecs.split(","))

    def scan(self, codecs: str, full_bytes: int) -> float:
        """Seconds to go over the model once for a patch with these codecs."""
        return STEP + full_bytes / (_rate(codecs) * self._speed(codecs))

    def element(self, codecs: str) -> float:
        """Seconds for each element that a patch with these codecs carries."""
        return _element(codecs) / self._speed(codecs)

    def _speed(self, codecs: str) -> float:
        return self.speed if self.quick is None or is_contextual(codecs) else self.quick

    def strong(self, full_bytes: int) -> float:
        """Seconds for the strong digests of a result, once per route with bytes that the publisher did not sign."""
        return full_bytes / (STRONG * self.speed)

    def anchor(self, size: int, full_bytes: int) -> float:
        """Seconds from an anchor's first byte to an image that is proven."""
        return STEP + size / self.link + 2 * size / COPY + self.strong(full_bytes)


def apply_speed(patches: Iterable[Applied], full_bytes: int, seconds: float, *, strong: bool = False) -> float:
    """What an island that took `seconds` to decode these patches (with `strong` also the strong digests of the result)
    is known by: the bytes of a model that it goes over in a second for a contextual patch, whatever codecs these have.
    """
    alone = sum(full_bytes / _rate(patch.codecs) + (patch.changed or 0) * _element(patch.codecs) for patch in patches)
    return CONTEXTUAL * (alone + (full_bytes / STRONG if strong else 0.0)) / seconds


def is_contextual(codecs: str) -> bool:
    """Whether a patch has blocks that are coded given the old weights."""
    return "contextual" in codecs


def _rate(codecs: str) -> float:
    """That of the codec that most of a patch has: beside the first two, the others carry scales and other small tensors
    that change everywhere, and their elements are counted as changed.
    """
    return next((rate for codec, rate in RATES.items() if codec in codecs), XOR)


def _element(codecs: str) -> float:
    return SHIPPED_IN_CONTEXT if is_contextual(codecs) else SHIPPED
