"""Routes. Pure: no database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry.plan import Node, NoRoute, UnknownBase, plan


def node(number: int, parent: int | None = -2, *, digest: str = "", patch: bool = True, anchor: bool = False) -> Node:
    parent = number - 1 if parent == -2 else parent
    return Node(
        number=number,
        state_digest=digest or f"{number:064d}",
        manifest=f"m{number}",
        parent=parent if parent is not None and parent >= 0 else None,
        parts=((f"p{number}", 10),) if patch and parent is not None and parent >= 0 else None,
        anchor=({"path": "model.safetensors", "sha256": f"a{number}", "size": 1000},) if anchor else None,
    )


def chain(length: int, anchors: set[int]) -> list[Node]:
    return [node(number, anchor=number in anchors) for number in range(length)]


def shape(found: object) -> list[str]:
    return [f"anchor {s['version']}" if s["kind"] == "anchor" else f"{s['from']}>{s['to']}" for s in found.steps]  # type: ignore[attr-defined]


def test_step_patches_from_what_is_held() -> None:
    found = plan(chain(5, {0}), 4, f"{1:064d}")
    assert shape(found) == ["1>2", "2>3", "3>4"]
    assert (found.start, found.bytes) == (1, 30)
    assert [step["manifest"] for step in found.steps] == ["m2", "m3", "m4"]


def test_nothing_held_starts_at_the_nearest_anchor() -> None:
    found = plan(chain(6, {0, 3}), 5, "")
    assert shape(found) == ["anchor 3", "3>4", "4>5"]
    assert (found.start, found.bytes) == (None, 1020)


def test_a17_target_equals_current_is_no_step() -> None:
    found = plan(chain(3, {0}), 2, f"{2:064d}")
    assert (found.steps, found.start, found.bytes) == ((), 2, 0)


def test_rollback_goes_by_anchor() -> None:
    assert shape(plan(chain(5, {0}), 2, f"{4:064d}")) == ["anchor 0", "0>1", "1>2"]


def test_equal_digests_take_the_nearest_version() -> None:
    nodes = [node(0, anchor=True), node(1), node(2, digest=f"{1:064d}"), node(3)]
    assert shape(plan(nodes, 3, f"{1:064d}")) == ["2>3"]


def test_a11_unknown_digest_is_said() -> None:
    with pytest.raises(UnknownBase):
        plan(chain(3, {0}), 2, "f" * 64)


def test_a12_a_hole_is_refused() -> None:
    nodes = [node(0, anchor=True), node(1), node(2, patch=False), node(3)]
    with pytest.raises(NoRoute, match="Version 2"):
        plan(nodes, 3, f"{0:064d}")


def test_a12_a_collected_parent_is_refused_or_anchored() -> None:
    with pytest.raises(NoRoute):
        plan([node(2), node(3)], 3, "")
    assert shape(plan([node(0), node(3, anchor=True)], 3, f"{0:064d}")) == ["anchor 3"]


def test_a17_unknown_target_is_refused() -> None:
    with pytest.raises(NoRoute):
        plan(chain(2, {0}), 7, "")


def test_a_patch_over_a_failed_number() -> None:
    nodes = [node(0, anchor=True), node(2, parent=0), node(3)]
    assert shape(plan(nodes, 3, f"{0:064d}")) == ["0>2", "2>3"]


@given(st.integers(1, 30), st.data())
def test_every_route_is_an_unbroken_chain(length: int, data: st.DataObject) -> None:
    anchors = data.draw(st.sets(st.integers(0, length - 1), max_size=4)) | {0}
    holes = data.draw(st.sets(st.integers(1, length), max_size=4))
    nodes = [node(number, patch=number not in holes, anchor=number in anchors) for number in range(length)]
    target = data.draw(st.integers(0, length - 1))
    held = data.draw(st.none() | st.integers(0, length - 1))
    try:
        found = plan(nodes, target, "" if held is None else f"{held:064d}")
    except NoRoute:
        nearest = max(number for number in anchors if number <= target)
        assert any(nearest < hole <= target for hole in holes)
        return
    at = found.start
    for step in found.steps:
        if step["kind"] == "anchor":
            assert at is None and step["version"] in anchors
            at = step["version"]
        else:
            assert (at, step["to"]) == (step["from"], step["from"] + 1) and step["to"] not in holes
            at = step["to"]
    assert at == target
