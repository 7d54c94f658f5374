"""What the next patch of a run is encoded for: small, or quick to apply, by the links and speeds of its islands."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.fleet import encoding
from controlplane.fleet.models import Island
from controlplane.registry.models import Patch, Run, Version
from tests.factories import mk_island, mk_version

pytestmark = pytest.mark.django_db

FULL, CHANGED = 16_000_000_000, 20_000_000
BYTES = {"contextual": CHANGED, "positional": CHANGED * 3 // 2}  # of a patch with these codecs
SLOW, FAST = 1_000_000, 5_000_000_000


def publish(run: Run, *codecs: str, changed: int = CHANGED) -> None:
    """A first version, unless there is one, then one with a patch of each of these codecs."""
    newest = Version.objects.filter(run=run).order_by("-number").first() or mk_version(run, 0)
    for name in codecs:
        before, size = newest, BYTES[name] * changed // CHANGED
        newest = mk_version(run, before.number + 1, parent=before, patch_bytes=None, full_bytes=FULL)
        Patch.objects.create(
            run=run, from_version=before, to_version=newest, bytes=size, changed=changed, codecs=name
        )  # fmt: skip


@pytest.fixture
def linked(run: Run) -> Run:
    run.encode_for = Run.EncodeFor.LINK
    run.save()
    return run


def island(run: Run, link: int | None, **facts: Any) -> Island:
    codecs = {"codecs": ["dense", "xor", "positional", "contextual"]}
    return mk_island(run, link_bytes_per_second=link, **(codecs | facts))


def test_the_smallest_unless_the_run_asks_for_more(run: Run) -> None:
    publish(run, "contextual", "positional")
    island(run, FAST)
    assert encoding.wanted(run) == "size"


def test_each_kind_is_tried_before_one_is_chosen(linked: Run) -> None:
    island(linked, SLOW)
    assert encoding.wanted(linked) == "size", "nothing is there yet"
    publish(linked, "contextual")
    assert encoding.wanted(linked) == "speed", "what the other takes is not known yet"
    publish(linked, "positional")
    assert encoding.wanted(linked) == "size"
    publish(linked, *["contextual"] * encoding.LATELY)
    assert encoding.wanted(linked) == "speed", "what it took so long ago says little"


def test_without_an_island_whose_link_is_known_the_smallest(linked: Run) -> None:
    publish(linked, "contextual", "positional")
    island(linked, None)
    island(linked, FAST, pending=True)
    island(linked, FAST, enabled=False)
    assert encoding.wanted(linked) == "size"


@pytest.mark.parametrize(("link", "wanted"), [(SLOW, "size"), (FAST, "speed")])
def test_by_the_link(linked: Run, link: int, wanted: str) -> None:
    publish(linked, "contextual", "positional")
    island(linked, link)
    assert encoding.wanted(linked) == wanted


def test_the_seconds_of_all_islands_count_together(linked: Run) -> None:
    publish(linked, "contextual", "positional")
    island(linked, SLOW)
    for _ in range(3):
        island(linked, FAST)
    assert encoding.wanted(linked) == "size", "one waits longer than the others gain"


def test_a_patch_of_more_changes_is_not_held_against_its_encoding(linked: Run) -> None:
    publish(linked, "positional")
    publish(linked, "contextual", changed=4 * CHANGED)
    island(linked, SLOW)
    assert encoding.wanted(linked) == "size"


def test_an_island_that_can_not_read_the_smallest_gets_the_other(linked: Run) -> None:
    publish(linked, "contextual", "positional")
    for _ in range(9):
        island(linked, SLOW)
    island(linked, SLOW, codecs=["dense", "xor", "positional"])
    assert encoding.wanted(linked) == "speed"


def test_by_what_an_island_is_quick_with(linked: Run) -> None:
    publish(linked, "contextual", "positional")
    found = island(linked, FAST, apply_bytes_per_second=20_000_000_000, quick_bytes_per_second=2_000_000_000)
    assert encoding.wanted(linked) == "size", "it takes longer over positional patches than their model says"
    found.quick_bytes_per_second = None
    found.save()
    assert encoding.wanted(linked) == "speed"
