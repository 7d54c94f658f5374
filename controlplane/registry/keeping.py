"""Which versions must stay so that every one that is wanted can be reached. A pure function; it reads no database.

A wanted version needs an unbroken chain of step patches from an anchor at it or before it; an island that holds an
older version needs the chain from there to its target. Whatever lies on such a chain stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ON_THE_WAY = "a route leads over it"


@dataclass(frozen=True, slots=True)
class Node:
    """A ready version, by the key of its row. `stepped`: a step patch leads to it from its parent."""

    key: int
    number: int
    parent: int | None
    stepped: bool
    anchored: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """Why each version stays, by its key, and the wanted ones that no anchor leads to."""

    reasons: Mapping[int, str]
    unreachable: tuple[int, ...]


def keep(nodes: Iterable[Node], wanted: Mapping[int, str], islands: Iterable[tuple[int, int]]) -> Kept:
    """`wanted` has a reason for each key that is wanted by itself; `islands` are pairs of keys: held, target."""
    by_key = {node.key: node for node in nodes}
    reasons = {key: why for key, why in wanted.items() if key in by_key}
    based: set[int] = set()  # an anchor leads here by what is kept already
    unreachable = []
    for key in sorted(reasons, key=lambda key: by_key[key].number):
        chain = _to_anchor(by_key, key, based)
        if chain is None:
            unreachable.append(key)
            chain = _to_origin(by_key, key)  # nothing that might still help somebody is given away
        else:
            based.update(chain)
        for step in chain:
            reasons.setdefault(step, ON_THE_WAY)
    for held, target in islands:
        chain = _between(by_key, held, target)
        for step in chain:
            reasons.setdefault(step, ON_THE_WAY)
    return Kept(reasons, tuple(unreachable))


def _to_anchor(by_key: Mapping[int, Node], key: int, based: set[int]) -> list[int] | None:
    """From a version back to the nearest one with an anchor; None when the chain breaks off before."""
    chain = []
    node: Node | None = by_key[key]
    while node is not None:
        chain.append(node.key)
        if node.anchored or node.key in based:
            return chain
        node = _before(by_key, node)
    return None


def _to_origin(by_key: Mapping[int, Node], key: int) -> list[int]:
    chain = []
    node: Node | None = by_key[key]
    while node is not None:
        chain.append(node.key)
        node = _before(by_key, node)
    return chain


def _between(by_key: Mapping[int, Node], held: int, target: int) -> list[int]:
    """From the target back to what is held; empty when that is not among its ancestors."""
    chain = []
    node = by_key.get(target)
    while node is not None:
        chain.append(node.key)
        if node.key == held:
            return chain
        node = _before(by_key, node)
    return []


def _before(by_key: Mapping[int, Node], node: Node) -> Node | None:
    return by_key.get(node.parent) if node.stepped and node.parent is not None else None
