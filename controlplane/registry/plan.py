"""The route to a version: which files, in which order. A pure function over what the run has; it reads no database.

From a version that is held, step patches lead to the target along its ancestors. Where they do not (nothing is held,
the target lies behind, a patch was collected), the route starts from the nearest ancestor of the target with an
anchor. A chain with a hole is refused, never jumped over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """What a plan needs of one version. `parts` is None without a step patch from the parent, `anchor` None without
    one.
    """

    number: int
    state_digest: str
    manifest: str
    parent: int | None
    parts: tuple[tuple[str, int], ...] | None  # sha256, size
    anchor: tuple[Mapping[str, Any], ...] | None  # {path, sha256, size}


@dataclass(frozen=True, slots=True)
class Plan:
    """A route. `start` is the held version that it begins from, None when it begins from an anchor."""

    start: int | None
    target: int
    steps: tuple[dict[str, Any], ...]
    bytes: int

    def as_json(self) -> dict[str, Any]:
        """As the API answers it."""
        return {"from": self.start, "to": self.target, "bytes": self.bytes, "steps": list(self.steps)}


class UnknownBase(Exception):  # noqa: N818  an answer, not a fault
    """No version has the digest that is held."""


class NoRoute(Exception):  # noqa: N818
    """Nothing leads to the target; the text says where the hole is."""


def plan(nodes: Sequence[Node], target: int, held: str) -> Plan:
    """The route from the state `held` (empty: nothing) to version `target`. Raises UnknownBase, NoRoute.

    `nodes` holds the target, its ancestors and whatever may be held; versions that are not ready must not be among
    them.
    """
    by_number = {node.number: node for node in nodes}
    if target not in by_number:
        raise NoRoute(f"Version {target} is not ready.")
    if held and not any(node.state_digest == held for node in nodes):
        raise UnknownBase(
            "No version of this run has the digest that you hold; ask without it to start from an anchor."
        )
    behind: list[Node] = []  # from the target backwards: the patches that have to be applied, last one first
    hole = ""
    node = by_number[target]
    while True:
        if held and node.state_digest == held:
            return _route(node.number, target, None, behind)
        if node.parts is None:
            hole = f"Version {node.number} has no patch from its parent"
            break
        if node.parent is None or node.parent not in by_number:
            hole = f"The parent of version {node.number} is not retained"
            break
        behind.append(node)
        node = by_number[node.parent]
    return _from_anchor(by_number, target, hole)


def _from_anchor(by_number: Mapping[int, Node], target: int, hole: str) -> Plan:
    """Starts from the nearest ancestor with an anchor; `hole` is where the chain of patches ends."""
    behind: list[Node] = []
    node = by_number[target]
    while node.anchor is None:
        if node.parts is None or node.parent is None or node.parent not in by_number:
            raise NoRoute(f"{hole}, and no anchor lies between it and version {target}.")
        behind.append(node)
        node = by_number[node.parent]
    return _route(None, target, node, behind)


def _route(start: int | None, target: int, anchor: Node | None, behind: Sequence[Node]) -> Plan:
    steps: list[dict[str, Any]] = []
    size = 0
    if anchor is not None and anchor.anchor is not None:
        files = [dict(file) for file in anchor.anchor]
        size += sum(int(file["size"]) for file in files)
        steps.append({"kind": "anchor", "version": anchor.number, "manifest": anchor.manifest, "files": files})
    for node in reversed(behind):
        parts = [{"sha256": sha256, "size": length} for sha256, length in node.parts or ()]
        size += sum(length for _, length in node.parts or ())
        steps.append(
            {"kind": "patch", "from": node.parent, "to": node.number, "manifest": node.manifest, "parts": parts}
        )
    return Plan(start, target, tuple(steps), size)
