"""Two processes that train together publish one version: DDP, FSDP2 and mixtures, over gloo, against a real socket."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.errors import CheckpointError, Conflict, InventoryMismatch, MailboatError
from mailboat.patch import PatchFile
from mailboat.trainer import PeerFailed, RankedPublisher, follow
from mailboat.trainer.ranks import Ranks
from mailboat.trainer.tensors import tensor_source
from tests.island.contract_server import PROJECT, RUN, ContractServer
from tests.island.fleet import image_state, island

RANKS = 2


class Net(nn.Module):
    """Sizes that two ranks can't halve, one that leaves a rank nothing, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 17)
        self.inner = nn.Linear(17, 17)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(17, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.inner(self.embed(tokens))) * self.scale)
        return logits


def _rank(rank: int, addresses: dict[str, str], folder: Path) -> None:
    """One of the two processes: all works, one after the other, each against a server of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    try:
        for name, address in addresses.items():
            state = folder / name / "state"
            with RankedPublisher(address, PROJECT, RUN, "publisher", state_dir=state) as publisher:
                result = WORKS[name](publisher, rank)
            torch.save(result, folder / name / f"result-{rank}")
    except BaseException:
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Worked:
    """What became of one work: the server's side, each rank's result, and the folder of both."""

    server: ContractServer
    results: list[Any]
    folder: Path


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Worked]]:
    """All works, done by one pair of processes: starting them is what takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        # For those that run the kernels: Triton asks when it is imported.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TRITON_INTERPRET", "1")
        servers = {name: stack.enter_context(ContractServer().serving()) for name in WORKS}
        servers["quick"].run_says = {"encode_next": "speed"}
        for name in WORKS:
            (folder / name).mkdir()
        with suppress(mp.ProcessRaisedException, mp.ProcessExitedException):
            mp.spawn(_rank, ({name: server.address for name, server in servers.items()}, folder), nprocs=RANKS)

        def of(name: str) -> Worked:
            paths = [folder / name / f"result-{rank}" for rank in range(RANKS)]
            if not all(path.exists() for path in paths):
                pytest.fail("\n".join(path.read_text() for path in sorted(folder.glob("failed-*"))))
            return Worked(servers[name], [torch.load(path, weights_only=False) for path in paths], folder / name)

        yield of


def _wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = Net()
    if how == "ddp":
        return net, nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if how == "fsdp2":
        return net, fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("copies", "shards"))
    return net, fully_shard(net, mesh=mesh)


def _train(how: str, publisher: RankedPublisher, rank: int) -> list[tuple[Any, ...]]:
    net, wrapped = _wrapped(how)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    served = follow(optimizer, net.named_parameters(remove_duplicate=False))
    side = {"config.json": b'{"tie_word_embeddings": true}'} if rank == 0 else None
    if how == "fsdp2":
        with pytest.raises(CheckpointError, match="RankedPublisher"):
            tensor_source(served, {})
    found = []
    for step in range(4):
        version = publisher.publish(served, step=step, side_files=side if step == 0 else None, wait=step != 2)
        whole = {
            name: (p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()).bfloat16()
            for name, p in net.named_parameters(remove_duplicate=False)
        }
        whole["head.weight"] = whole["embed.weight"]
        expected = measure(tensor_source(whole, {"config.json": b'{"tie_word_embeddings": true}'})).digest
        last = served.last
        assert version.seconds is not None and min(version.seconds.build, version.seconds.upload) > 0
        found.append((version.number, version.digest, expected, version.changed, last and last.seconds))
        tokens = torch.randint(0, 33, (4, 5), generator=torch.Generator().manual_seed(step * RANKS + rank))
        wrapped(tokens).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "hsdp", "ddp in place", "fsdp2 in place"])
def test_a26_what_two_ranks_hold_is_published_once(how: str, worked: Callable[[str], Worked], tmp_path: Path) -> None:
    work = worked(how)
    server, (first, second) = work.server, work.results
    assert [entry[:4] for entry in first] == [entry[:4] for entry in second]
    for number, (version, digest, expected, changed, _) in enumerate(first):
        assert (version, digest) == (number, expected)
        patch = server.versions[number].manifest.patch
        assert (patch is None) == (number == 0)
        if patch is not None:
            assert len(patch.parts) == RANKS and patch.changed == changed > 0
    inventory = server.blobs[server.versions[3].manifest.inventory.sha256]
    assert b"head.weight" in inventory, "as another name of the embedding"
    with island(server, tmp_path / "store", once=True) as running:
        running.join()
    assert image_state(tmp_path / "store").digest == first[3][1]


def _train_in_place(how: str, publisher: RankedPublisher, rank: int) -> list[tuple[Any, ...]]:
    """The same where kernels compare the tensors: through Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAILBOAT_DEVICE", "interpreter")
        found = _train(how, publisher, rank)
    assert bool(publisher._old._held) == (how == "fsdp2"), "a followed view needs no old bytes; a gathered tensor does"
    return found


def _differ(publisher: RankedPublisher, rank: int, kind: Callable[[Any], Any] = np.asarray) -> Any:
    tensors = {"a": kind(np.zeros(6, np.float32)), "norm.weight": kind(np.ones(4, np.float32))}
    publisher.publish(tensors)
    tensors["norm.weight"][2] = -0.0 if rank else 0.0
    with pytest.raises(CheckpointError, match=r"norm\.weight .*differ"):
        publisher.publish(tensors)
    return "norm.weight"


def _differ_in_place(publisher: RankedPublisher, rank: int) -> Any:
    """The same by sums, and of tensors that torch has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAILBOAT_DEVICE", "interpreter")
        return _differ(publisher, rank, torch.from_numpy)


@pytest.mark.parametrize("how", ["differ", "differ in place"])
def test_a26_replicas_that_differ_stop_the_publish_with_their_name(how: str, worked: Callable[[str], Worked]) -> None:
    work = worked(how)
    assert work.results == [r"norm.weight"] * RANKS
    assert sorted(work.server.versions) == [0]


def _stages(publisher: RankedPublisher, rank: int) -> Any:
    """Each rank holds a stage; the first has the embedding, the last the head, tied by the config."""
    weights = {name: np.random.default_rng(n).standard_normal((8, 4)).astype(np.float32) for n, name in enumerate("pq")}
    embed = weights["p"]
    stage = {"model.embed_tokens.weight": embed, "a.weight": weights["q"]}
    if rank:
        stage = {"lm_head.weight": embed.copy(), "b.weight": weights["q"] + 1}
    side = {"config.json": b'{"tie_word_embeddings": true}'}
    digests = [publisher.publish(stage, side_files=side).digest]
    for name in stage:
        stage[name][3, 2] += 1
    digests.append(publisher.publish(stage).digest)
    if rank:
        stage["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        publisher.publish(stage)
    return digests, stage


def test_a27_head_tied_to_an_embedding_on_another_rank(worked: Callable[[str], Worked]) -> None:
    (digests, first), (same, second) = worked("stages").results
    assert digests == same
    side = {"config.json": b'{"tie_word_embeddings": true}'}
    for absent in (False, True):
        whole = first | {name: value for name, value in second.items() if not (absent and name == "lm_head.weight")}
        if not absent:
            whole["lm_head.weight"] = first["model.embed_tokens.weight"].copy()
        assert measure(ArraySource(whole, side_files=side)).digest == digests[1]


def _fail(publisher: RankedPublisher, rank: int) -> Any:
    """One rank fails, in one way after the other; the other one is told, and the next publish goes through."""
    tensors = {"a": np.zeros(6, np.float32), "b": np.ones(60, np.float32)}
    publisher.publish(tensors)
    said: list[str] = []
    for wrong in (tensors | ({"b": [1.0]} if rank else {}), tensors | {"c": np.zeros(3, np.float32)}):
        with pytest.raises(MailboatError) as refused:
            publisher.publish(wrong)
        said.append(type(refused.value).__name__)
    tensors["b"][::7] = 3
    assert publisher._copy._lock is None or rank == 0, "one copy for the machine"
    upload = publisher._upload
    if rank:
        publisher._upload = _break  # type: ignore[method-assign]
    with pytest.raises(MailboatError) as refused:
        publisher.publish(tensors)
    said.append(type(refused.value).__name__)
    publisher._upload = upload  # type: ignore[method-assign]
    version = publisher.publish(tensors)
    return said, version.number, version.changed


def _quick(publisher: RankedPublisher, rank: int) -> Any:
    """Each rank holds a tensor; what the next patch is encoded for is the server's to say."""
    random = np.random.default_rng(rank)
    bits = random.integers(0, 1 << 16, (400, 64), np.uint16)
    tensors = {f"of.{rank}": bits.view(np.float16)}
    publisher.publish(tensors)
    bits.reshape(-1)[random.choice(bits.size, bits.size // 100, replace=False)] ^= 1
    return publisher.publish(tensors).number


def test_every_rank_encodes_for_what_the_server_says(worked: Callable[[str], Worked], tmp_path: Path) -> None:
    work = worked("quick")
    assert work.results == [1, 1]
    patch = work.server.versions[1].manifest.patch
    assert patch is not None and len(patch.parts) == RANKS
    for blob in patch.parts:
        path = tmp_path / blob.sha256
        path.write_bytes(work.server.blobs[blob.sha256])
        with PatchFile.open(path) as part:
            assert part.codecs == ("positional",)


def _groups(_: RankedPublisher, rank: int) -> Any:
    """Ranks outside of the group are not asked."""
    groups = [dist.new_group([each]) for each in range(RANKS)]
    mine = Ranks(groups[rank])
    return mine.tell("alone"), mine.rank


def test_group_is_made_by_its_members_alone(worked: Callable[[str], Worked]) -> None:
    assert worked("groups").results == [(["alone"], 0)] * RANKS


def _break(*_: Any) -> Any:
    raise Conflict(409, "refused", "The upload was refused.")


def test_failure_of_one_rank_fails_the_publish_on_all(worked: Callable[[str], Worked]) -> None:
    work = worked("fail")
    (first, *published), (second, *same) = work.results
    peer = PeerFailed.__name__
    assert first == [peer, InventoryMismatch.__name__, peer]
    assert second == [CheckpointError.__name__, InventoryMismatch.__name__, Conflict.__name__]
    assert published == same == [1, 9]
    assert sorted(work.server.versions) == [0, 1]
    assert not list((work.folder / "state").glob("version-*"))


WORKS: dict[str, Callable[[RankedPublisher, int], Any]] = {
    "ddp": partial(_train, "ddp"),
    "fsdp2": partial(_train, "fsdp2"),
    "hsdp": partial(_train, "hsdp"),
    "ddp in place": partial(_train_in_place, "ddp"),
    "fsdp2 in place": partial(_train_in_place, "fsdp2"),
    "differ in place": _differ_in_place,
    "differ": _differ,
    "stages": _stages,
    "fail": _fail,
    "quick": _quick,
    "groups": _groups,
}
