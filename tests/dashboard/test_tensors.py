"""Which tensors a version changed: real versions, published by the real library, in blobs of the real store."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.conf import settings
from django.test import Client

from controlplane.dashboard.rows import comparison, tensors
from controlplane.registry import blobs
from controlplane.registry.local_blobs import LocalBlobs
from controlplane.registry.models import Blob, Inventory, Version
from controlplane.registry.retention import removing
from mailboat.checkpoint.inventory import Inventory as Document
from mailboat.checkpoint.inventory import Tensor
from mailboat.patch.statistics import Statistics
from tests import factories as make
from tests.dashboard.conftest import World

NAMES = ["embed.weight", *(f"model.layers.{n}.{part}.weight" for n in (0, 1, 2, 10) for part in ("down", "up"))]


def _document(names: list[str]) -> Document:
    listed = sorted(names, key=str.encode)
    return Document(tuple(Tensor("target", name, "BF16", (8, 16), None) for name in listed), {}, None)


def _store(world: World, data: bytes) -> str:
    sha256, size = blobs.store().write(world.run.pk, data)
    Blob.objects.get_or_create(run=world.run, sha256=sha256, defaults={"size": size})
    return sha256


def _inventory(world: World, names: list[str]) -> Inventory:
    sha256 = _store(world, _document(names).to_bytes())
    facts = {"tensors": len(names), "elements": 128 * len(names), "full_bytes": 256 * len(names)}
    found, _ = Inventory.objects.get_or_create(run=world.run, sha256=sha256, defaults=facts)
    return found


def _digests(world: World, marks: list[int]) -> str:
    strong = b"".join(bytes([mark]) * 32 for mark in marks)
    return _store(world, bytes(16 * len(marks)) + strong)


@pytest.fixture
def changed(world: World, home: Any) -> Version:
    """Version 4, which changed three tensors of three."""
    inventory = _inventory(world, NAMES)
    count = len(NAMES)
    numbers, sizes, masks = np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.uint8)
    numbers[[1, 2, 6]], sizes[[1, 2, 6]], masks[[1, 2, 6]] = (5, 90, 7), (100, 400, 50), (4, 2, 4)
    steps = numbers * np.uint64(4) // np.uint64(5)
    sha256 = _store(world, Statistics(numbers, sizes, steps, masks).to_bytes())
    return make.mk_version(
        world.run,
        4,
        parent=world.versions[3],
        inventory=inventory,
        changed=102,
        unit_steps=int(steps.sum()),
        statistics=Blob.objects.get(run=world.run, sha256=sha256),
        digests_sha256=_digests(world, [0, 9, 9, 0, 0, 0, 9, 0, 0]),
    )


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def test_the_most_changed_come_first(changed: Version, world: World, mate: Client) -> None:
    page = _page(mate, world.url("runs/demo/versions/4/tensors/"))
    assert "3 of 9 tensors changed" in page
    rows = page.split('id="tensors-title"')[1]
    places = [rows.index(f"{name}<") for name in ("layers.0.up.weight", "layers.1.up.weight", "layers.0.down.weight")]
    assert places[0] < places[2]
    assert "8 × 16" in rows
    assert "70.3 %" in rows  # 90 of 128
    assert "80.0 %" in rows and "71.4 %" in rows  # 72 of 90, 5 of 7 go one step
    assert "79.4 % of them by one step" in page  # 81 of 102
    version = _page(mate, world.url("runs/demo/versions/4/"))
    assert "±1 steps" in version and "79.4 %" in version
    assert "Share of changes that are steps of one, in 4 versions" in _page(mate, world.url("runs/demo/"))
    by_name = _page(mate, world.url("runs/demo/versions/4/tensors/?order=name")).split('id="tensors-title"')[1]
    assert by_name.index("embed.weight") < by_name.index("layers.0.down.weight")


def test_layers_are_summed_in_the_order_of_the_model(changed: Version) -> None:
    table = tensors.table(Version.objects.select_related("statistics", "inventory").get(pk=changed.pk), "changed", 1)
    assert table is not None
    layers = {layer.name: layer for layer in table.layers}
    assert list(layers) == ["embed", "model.layers.0", "model.layers.1", "model.layers.2", "model.layers.10"]
    assert (layers["model.layers.0"].changed, layers["model.layers.0"].bytes) == (95, 500)
    assert layers["model.layers.0"].share == 100
    assert sum(layer.changed for layer in table.layers) == 102


def test_a_version_without_a_patch_has_no_statistics(world: World, mate: Client) -> None:
    assert "No statistics for this version" in _page(mate, world.url("runs/demo/versions/0/tensors/"))


def test_statistics_that_retention_took_are_told_of(changed: Version, world: World, mate: Client) -> None:
    address = world.url(f"runs/demo/versions/{changed.number}/tensors/")
    assert changed.statistics is not None
    blobs.store().remove(world.run.pk, changed.statistics.sha256)  # the row goes a moment later
    tensors._layers.cache_clear()
    page = _page(mate, address)
    assert "No statistics for this version" in page and "Retention has removed them" in page
    with removing():
        Version.objects.filter(pk=changed.pk).update(state=Version.State.RETIRED, statistics=None)
    assert "Retention has removed them" in _page(mate, address)
    answer = mate.get(f"/api/v1/projects/{world.project.slug}/runs/demo/versions/{changed.number}/tensors")
    assert answer.status_code == 404 and "retention removed them" in answer.json()["detail"]


def test_statistics_that_can_not_be_read_are_told_of(changed: Version, world: World, mate: Client) -> None:
    assert changed.statistics is not None
    sha256 = _store(world, b"of another build!")
    row = Blob.objects.get(run=world.run, sha256=sha256)
    make.mk_version(world.run, 5, parent=changed, inventory=changed.inventory, statistics=row)
    page = _page(mate, world.url("runs/demo/versions/5/tensors/"))
    assert "No statistics for this version" in page and "no sound statistics" in page
    path = LocalBlobs(Path(settings.MAILBOAT_BLOB_ROOT)).path(world.run.pk, sha256)
    path.unlink()
    path.write_bytes(b"damaged")
    page = _page(mate, world.url("runs/demo/versions/5/tensors/"))
    assert "No statistics for this version" in page and "damaged in the store" in page


def test_pages_and_orders_survive_nonsense(changed: Version, world: World, mate: Client) -> None:
    for query in ("?page=999", "?page=x", "?order=nonsense", "?page=-1"):
        assert mate.get(world.url(f"runs/demo/versions/4/tensors/{query}")).status_code == 200


def test_scanning_finds_what_the_strict_reader_finds() -> None:
    names = ["plain", 'quo"te', "back\\slash", "newline\n", "ümlaut.3.x", "a[b],c"]
    document = _document(names)
    assert [row.name for row in tensors.scan(document.to_bytes())] == [t.name for t in document.tensors]
    assert all(row.shape == (8, 16) and row.dtype == "BF16" for row in tensors.scan(document.to_bytes()))


def test_a59_half_a_million_tensors_stay_small() -> None:
    head = b'{"aliases":{},"format":"mailboat-inventory-1","quantiser":null,"tensors":['
    row = b'["target","model.layers.%d.mlp.experts.%d.w.weight","BF16",[2048,768],null]'
    document = head + b",".join(row % (n // 5000, n) for n in range(497_000)) + b"]}"
    tracemalloc.start()
    count = sum(1 for _ in tensors.scan(document))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 497_000
    assert peak < 4 * 2**20


def test_comparison_by_strong_digests(changed: Version, world: World, mate: Client) -> None:
    make.mk_version(
        world.run,
        5,
        parent=changed,
        inventory=changed.inventory,
        digests_sha256=_digests(world, [0] * 9),
        side_files=[{"path": "config.json", "sha256": "0" * 64, "size": 2}],
    )
    page = _page(mate, world.url("runs/demo/versions/5/compare/"))
    assert "v4 → v5" in page
    assert "6 hold the same bits" in page
    assert "config.json" in page
    assert "layers.10.up.weight" in page
    assert "layers.2.up.weight" not in page


def test_comparison_over_two_inventories(changed: Version, world: World) -> None:
    names = [*NAMES[1:], "lm_head.weight"]
    other = make.mk_version(world.run, 5, inventory=_inventory(world, names), digests_sha256=_digests(world, [0] * 9))
    found = comparison.compare(other, Version.objects.get(pk=changed.pk))
    assert found is not None
    assert (found.added, found.removed) == (1, 1)
    assert found.changed + found.same == 8
    assert {row.tensor.name for row in found.shown if row.how == "removed"} == {"lm_head.weight"}


def test_blobs_that_retention_took_are_said_to_be_gone(world: World, home: Any, mate: Client) -> None:
    assert "no digests on record" in _page(mate, world.url("runs/demo/versions/3/compare/"))


def test_equal_versions_say_so(changed: Version, world: World, mate: Client) -> None:
    assert "Both hold the same bits" in _page(mate, world.url("runs/demo/versions/4/compare/?from=4"))
    assert "There is no version 77" in _page(mate, world.url("runs/demo/versions/4/compare/?from=77"))
