"""Two ranks publish to the real server: its workers prove versions of several parts, and islands follow them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mailboat.trainer import RankedPublisher
from tests.island.fleet import image_state, island
from tests.together.test_real_server import Harbour, harbour, weights
from tests.waiting import eventually

__all__ = ["harbour"]  # a fixture


def _rank(rank: int, address: str, token: str, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        arrays = {f"rank.{rank}.{name}": array for name, array in weights(rank).items()} | {"replica": weights(2)["a"]}
        with RankedPublisher(address, "harbour", "voyage", token) as publisher:
            publisher.publish(arrays, step=0, side_files={"config.json": b"{}"})
            for step in (1, 2):
                arrays[f"rank.{rank}.a"][step::9, 3] += 1
                arrays["replica"][step, step] += 1
                version = publisher.publish(arrays, step=step)
        (folder / f"digest-{rank}").write_text(version.digest)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_versions_of_two_ranks_reach_islands_and_are_proven(harbour: Harbour, tmp_path: Path) -> None:
    mp = pytest.importorskip("torch.multiprocessing")
    store = tmp_path / "store"
    with island(harbour.server, store, token=harbour.enrol("skerry"), poll_seconds=1):
        mp.spawn(_rank, (harbour.server.address, harbour.publisher_token, tmp_path), nprocs=2)
        eventually(lambda: harbour.at("skerry") == 2)
    digests = {(tmp_path / f"digest-{rank}").read_text() for rank in range(2)}
    assert digests == {image_state(store).digest}
