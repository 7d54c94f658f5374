"""Routes. Pure: no database."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry.cost import STEP, Means, apply_speed
from controlplane.registry.plan import Edge, NoRoute, Route, estimate, plan, soonest

FULL = 1_000_000_000
FAST, SLOW = Means.of(link=10e9, cores=8), Means.of(link=1e6, cores=8)


def step(to: int, origin: int | None = None, *, size: int = 10_000_000, codecs: str = "contextual") -> Edge:
    return Edge(to, to - 1 if origin is None else origin, to, "step", size, 3_000_000, codecs)


def merged(origin: int, to: int, *, size: int, codecs: str = "contextual") -> Edge:
    kind = "merged" if to > origin else "reverse"
    return Edge(1000 * origin + to, origin, to, kind, size, 3_000_000, codecs)


def chain(length: int) -> list[Edge]:
    return [step(number) for number in range(1, length)]


def find(
    edges: Sequence[Edge], target: int, held: Collection[int] = (), anchors: Collection[int] = (0,), means: Means = SLOW
) -> Route:
    return plan(edges, dict.fromkeys(anchors, FULL), held, target, full_bytes=FULL, means=means)


def shape(found: Route) -> list[str]:
    begin = [] if found.anchor is None else [f"anchor {found.anchor}"]
    return begin + [f"{edge.origin}>{edge.to}" for edge in found.edges]


def test_step_patches_from_what_is_held() -> None:
    found = find(chain(5), 4, {1})
    assert shape(found) == ["1>2", "2>3", "3>4"]
    assert (found.start, found.bytes) == (1, 30_000_000)
    assert 30 < found.total < 60, "thirty megabytes over one megabyte a second, and a little"


def test_nothing_held_starts_at_the_nearest_anchor() -> None:
    found = find(chain(6), 5, anchors={0, 3})
    assert shape(found) == ["anchor 3", "3>4", "4>5"]
    assert (found.start, found.bytes) == (None, FULL + 20_000_000)


def test_a17_target_equals_current_is_no_step() -> None:
    found = find(chain(3), 2, {2})
    assert (found.edges, found.start, found.bytes, found.total) == ((), 2, 0, 0)


def test_rollback_goes_by_anchor_or_by_a_reverse_patch() -> None:
    assert shape(find(chain(5), 2, {4})) == ["anchor 0", "0>1", "1>2"]
    assert shape(find([*chain(5), merged(4, 2, size=15_000_000)], 2, {4})) == ["4>2"]
    back_and_on = [*chain(5), merged(4, 1, size=15_000_000)]
    assert shape(find(back_and_on, 2, {4})) == ["4>1", "1>2"]


def test_equal_digests_take_the_nearest_version() -> None:
    assert shape(find(chain(4), 3, {1, 2})) == ["2>3"]


def test_a12_a_hole_is_refused() -> None:
    holed = [edge for edge in chain(4) if edge.to != 2]
    with pytest.raises(NoRoute, match="Version 2 has no patch"):
        find(holed, 3, {0}, anchors=())
    with pytest.raises(NoRoute):
        find([step(3)], 3)
    assert shape(find(holed, 3, {0}, anchors={2})) == ["anchor 2", "2>3"]


def test_a17_unknown_target_is_refused() -> None:
    with pytest.raises(NoRoute):
        find(chain(2), 7, {0})


def test_a_patch_over_a_failed_number() -> None:
    assert shape(find([step(2, 0), step(3)], 3, {0})) == ["0>2", "2>3"]


def test_a_merged_patch_saves_the_slow_link_and_not_the_fast_one() -> None:
    edges = [
        *(step(number, size=1_000_000, codecs="positional") for number in range(1, 3)),
        merged(0, 2, size=1_900_000),
    ]
    assert shape(find(edges, 2, {0}, means=Means.of(link=1e5, cores=8))) == ["0>2"]
    assert shape(find(edges, 2, {0}, means=FAST)) == ["0>1", "1>2"], "scanning and proving cost more than 100 kB"


def test_contextual_where_the_link_is_slow_and_positional_where_it_is_fast() -> None:
    both = [merged(0, 2, size=1_000_000), *(step(number, size=1_500_000, codecs="positional") for number in (1, 2))]
    assert shape(find(both, 2, {0}, means=Means.of(link=1e5, cores=8))) == ["0>2"]
    assert shape(find(both, 2, {0}, means=FAST)) == ["0>1", "1>2"]


def test_a_codec_that_the_island_does_not_know_is_no_edge() -> None:
    edges = [*(step(number, codecs="positional") for number in range(1, 3)), merged(0, 2, size=1)]
    old = Means.of(link=1e6, codecs=["dense", "positional"])
    assert shape(find(edges, 2, {0}, means=old)) == ["0>1", "1>2"]
    with pytest.raises(NoRoute, match="codec"):
        find([merged(0, 2, size=1)], 2, {0}, anchors=(), means=old)


def test_an_anchor_is_taken_when_the_way_from_what_is_held_is_longer() -> None:
    long = chain(400)
    assert shape(find(long, 399, {0}, anchors={0, 398}, means=SLOW)) == ["anchor 398", "398>399"]
    assert len(find(long, 20, {0}, anchors={0, 19}, means=SLOW).edges) == 20


def aligned(length: int, up_to: int) -> list[Edge]:
    """Steps, and merged patches over aligned spans whose size grows like that of real ones."""
    edges, span = chain(length), 2
    while span <= up_to:
        size = int(10_000_000 * span**0.7)
        edges += [merged(end - span, end, size=size) for end in range(span, length, span)]
        span *= 2
    return edges


@pytest.mark.parametrize("lag", [1, 3, 4, 8, 16, 32, 100, 250])
def test_a16_any_lag_takes_few_patches(lag: int) -> None:
    edges = aligned(600, 256)
    most = 2 * math.log2(lag) + 2
    for target in range(lag, 600, 7):
        assert len(find(edges, target, {target - lag}).edges) <= most


def test_an_estimate_counts_the_steps_over_a_fork() -> None:
    edges = [*chain(6), step(6, 3), step(7)]
    assert estimate(edges, 2, 5) == (int(30_000_000 * 3**-0.3), int(9_000_000 * 3**-0.3), 3)
    assert estimate(edges, 5, 2) == estimate(edges, 2, 5)
    assert (estimate(edges, 5, 7) or (0, 0, 0))[2] == 4, "back to 3 and on to 7"
    assert estimate(edges, 1, 1) is None and estimate(edges[2:], 0, 5) is None


@st.composite
def grounds(draw: st.DrawFn) -> tuple[list[Edge], set[int], set[int], int]:
    length = draw(st.integers(2, 14))
    numbers = st.integers(0, length - 1)
    kept = draw(st.sets(st.integers(1, length - 1)))
    edges = [step(number, size=draw(st.integers(0, 10**8))) for number in kept]
    for origin, to in draw(st.sets(st.tuples(numbers, numbers), max_size=12)):
        if origin != to:
            codecs = draw(st.sampled_from(["positional", "contextual", "positional,xor"]))
            edges.append(merged(origin, to, size=draw(st.integers(0, 10**8)), codecs=codecs))
    anchors = draw(st.sets(numbers, max_size=3))
    return edges, anchors, draw(st.sets(numbers, max_size=2)), draw(numbers)


@given(grounds(), st.sampled_from([1e5, 1e7, 1e10]))
def test_every_route_is_an_unbroken_chain_and_no_other_is_sooner(
    ground: tuple[list[Edge], set[int], set[int], int], link: float
) -> None:
    edges, anchors, held, target = ground
    means = Means.of(link=link, cores=4)
    best = slowly(edges, anchors, held, target, means)
    try:
        found = find(edges, target, held, anchors, means)
    except NoRoute:
        assert best == math.inf
        return
    assert found.total == pytest.approx(best)
    assert (found.start is None) != (found.anchor is None)
    at = found.anchor if found.start is None else found.start
    assert at in (held if found.anchor is None else anchors)
    for edge in found.edges:
        assert edge in edges and edge.origin == at
        at = edge.to
    assert at == target


def slowly(edges: list[Edge], anchors: set[int], held: set[int], target: int, means: Means) -> float:
    """Seconds of the soonest route, by trying again until nothing changes; whether it was proven is part of the
    place.
    """
    if target in held:
        return 0.0
    best = {(number, False): means.anchor(FULL, FULL) for number in anchors} | {(number, False): 0.0 for number in held}
    for _ in range(2 * len(edges) + 2):
        for edge in edges:
            for proven in (False, True):
                if (seconds := best.get((edge.origin, proven))) is None:
                    continue
                elements = (edge.changed or 0) * means.element(edge.codecs)
                seconds += edge.bytes / means.link + elements + means.scan(edge.codecs, FULL)
                after = proven or edge.kind != "step"
                seconds += means.strong(FULL) if after and not proven else 0.0
                best[edge.to, after] = min(seconds, best.get((edge.to, after), math.inf))
    return min(best.get((target, False), math.inf), best.get((target, True), math.inf))


@given(
    st.floats(1e5, 1e11), st.integers(1, 128), st.tuples(st.floats(0.1, 3.9), st.floats(0.1, 3.9)),
    st.integers(10**6, 10**12), st.floats(1e-5, 0.05), st.floats(0.2, 1.5), st.floats(1.0, 4.0),
)  # fmt: skip
def test_of_two_encodings_none_is_sooner_than_the_one_that_is_taken(
    link: float, cores: int, factors: tuple[float, float], full: int, density: float, small: float, more: float
) -> None:
    """For a machine that is as many times as fast as its cores promise with either, known by its own updates."""
    changed = int(full / 2 * density)
    size = int(changed * small)
    edges = [step(1, size=size), step(1, size=int(size * more), codecs="positional")]
    edges = [edge._replace(changed=changed) for edge in edges]
    nominal = Means.of(link=link, cores=cores)
    speeds = {edge.codecs: nominal.speed * factor for edge, factor in zip(edges, factors, strict=True)}

    def decoding(edge: Edge) -> float:
        true = Means(speed=speeds[edge.codecs])
        return true.scan(edge.codecs, full) - STEP + changed * true.element(edge.codecs)

    apply, quick = (apply_speed([edge], full, decoding(edge)) for edge in edges)
    known = Means.of(link=link, cores=cores, apply=apply, quick=quick)
    seconds = {edge.codecs: edge.bytes / link + decoding(edge) for edge in edges}
    found = plan(edges, {}, {0}, 1, full_bytes=full, means=known).edges[0]
    assert soonest(edges, [known], full) is found
    assert seconds[found.codecs] <= 1.05 * min(seconds.values())
