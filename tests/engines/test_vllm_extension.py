"""The worker extension on one and several ranks: the same bytes as a reload, sums that add up, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure
from mailboat.image import Image
from mailboat.island.engines.staging import StagingFolder
from mailboat.island.engines.vllm_extension import (
    Mapping,
    Stage,
    TensorSpec,
    Unmapped,
    job_of,
    live_sums,
    read_specs,
    write,
)
from tests.engines.contract_engine import Indices, Layer, Worker
from tests.sidecar.harness import Versions


def image_of(versions: Versions, folder: Path) -> Image:
    write_checkpoint(versions.source(), folder / "checkpoint")
    with Checkpoint.open(folder / "checkpoint") as checkpoint:
        return Image.create(folder / "image", checkpoint, measure(checkpoint))


def added(answers: list[dict[str, Any]], count: int) -> np.ndarray[Any, Any]:
    total = np.zeros((count, 2), np.uint64)
    for answer in answers:
        for index, a, b in answer["sums"]:
            total[index] += np.array([int(a), int(b)], np.uint64)
    return total


def bits(worker: Worker) -> list[bytes]:
    return [value.detach().view(torch.int16).numpy().tobytes() for value in worker.model_runner.model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_writes_its_slices_and_the_sums_add_up(ranks: int, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    image = image_of(versions, tmp_path)
    workers = [Worker(rank, ranks) for rank in range(ranks)]
    for worker in workers:
        worker.reload_weights(str(image.folder))
    folder = StagingFolder(tmp_path)
    folder.write_inventory(image.inventory)
    answers = [worker.mailboat_open(str(folder.path)) for worker in workers]
    elements = [tensor.elements for tensor in image.inventory.tensors]
    assert np.sum([answer["covered"] for answer in answers], axis=0).tolist() == elements
    assert np.array_equal(added([worker.mailboat_sums() for worker in workers], len(elements)), image.state.sums)
    for number in range(1, 4):
        patch, state = versions.next()
        overlay = image.prepare([patch], state)
        path, written = folder.write_overlay(overlay, number)
        before = [bits(worker) for worker in workers]
        staged = [worker.mailboat_stage(str(path), number) for worker in workers]
        assert sum(answer["changed"] for answer in staged) == written == overlay.changed
        assert [bits(worker) for worker in workers] == before, "staging touches nothing"
        assert "refused" in workers[0].mailboat_write(number + 100)
        change = added([worker.mailboat_write(number) for worker in workers], len(elements))
        assert np.array_equal(image.state.sums + change, state.sums)
        image.commit(overlay)
        overlay.close()
        assert np.array_equal(added([worker.mailboat_sums() for worker in workers], len(elements)), state.sums)
        for rank, worker in enumerate(workers):
            reloaded = Worker(rank, ranks)
            reloaded.reload_weights(str(image.folder))
            assert bits(worker) == bits(reloaded)
    folder.close()
    image.close()


def spoil_dtype(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(16, 32), requires_grad=False)


def spoil_shape(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)


def spoil_empty(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data = torch.empty(0, dtype=torch.bfloat16)


def spoil_copy(model: Any) -> None:
    packed = torch.zeros(3)
    model.model.layers[0].mlp.down_proj.cpu_linear = lambda x, _weight, _bias: x + packed


def spoil_derived(model: Any) -> None:
    model.model.layers[0].self_attn.W_UV = torch.zeros(2)


def spoil_tie(model: Any) -> None:
    model.lm_head = Layer(64, 16, shard_indices=Indices(0, 50))


@pytest.mark.parametrize("spoil", [spoil_dtype, spoil_shape, spoil_empty, spoil_copy, spoil_derived])
def test_a30_what_can_not_be_mapped_is_refused_before_anything_is_touched(spoil: Any, tmp_path: Path) -> None:
    image = image_of(Versions(tmp_path), tmp_path)
    worker = Worker()
    spoil(worker.model_runner.model)
    before = bits(worker)
    folder = StagingFolder(tmp_path)
    folder.write_inventory(image.inventory)
    assert worker.mailboat_open(str(folder.path))["refused"]
    assert "refused" in worker.mailboat_stage("nowhere", 1) and "refused" in worker.mailboat_sums()
    assert bits(worker) == before
    image.close()


def test_a30_a_tensor_without_a_home_is_not_covered(tmp_path: Path) -> None:
    image = image_of(Versions(tmp_path), tmp_path)
    worker = Worker()
    del worker.model_runner.model.model.norm
    folder = StagingFolder(tmp_path)
    folder.write_inventory(image.inventory)
    covered = worker.mailboat_open(str(folder.path))["covered"]
    names = [tensor.name for tensor in image.inventory.tensors]
    assert [name for name, count in zip(names, covered, strict=True) if not count] == ["model.norm.weight"]
    image.close()


def test_a_tie_that_the_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    worker = Worker()
    spoil_tie(worker.model_runner.model)
    image = image_of(Versions(tmp_path), tmp_path)
    folder = StagingFolder(tmp_path)
    folder.write_inventory(image.inventory)
    specs, _ = read_specs(str(folder.path))
    with pytest.raises(Unmapped, match="tied"):
        Mapping(worker.model_runner.model, specs, {"lm_head.weight": "model.embed_tokens.weight"})
    image.close()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 8), (2, 3, 5), (1, 1)])
def test_sums_are_those_of_the_format_for_every_width_and_odd_rows(dtype: Any, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(4)
    old = random.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    new = old.copy()
    where = np.sort(random.choice(old.size, max(1, old.size // 3), replace=False))
    new.reshape(-1)[where] ^= dtype(1)
    names = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
    width = old.dtype.itemsize
    before, after = (measure(ArraySource({"x": value}, dtypes={"x": names[width]})) for value in (old, new))
    from mailboat.digest import seeds

    tensor = before.inventory.tensors[0]
    spec = TensorSpec("x", tensor.dtype, tensor.shape, width, seeds(tensor))
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    live = torch.from_numpy(old.copy().reshape(-1).view(np.uint8)).view(signed).reshape(spec.rows, spec.columns)
    from mailboat.island.engines.vllm_extension import Slice

    part = Slice(live, 0, 0, counted=True)
    assert [value % (1 << 64) for value in live_sums(spec, part)] == before.sums[0].tolist()
    values = torch.from_numpy(new.reshape(-1)[where].copy().view(np.uint8)).view(signed)
    found = job_of(0, spec, part, torch.from_numpy(where), values)
    assert found is not None
    change = np.array([value % (1 << 64) for value in write(Stage.of(0, [found]))[0]], np.uint64)
    assert np.array_equal(before.sums[0] + change, after.sums[0])
    assert live.reshape(-1).view(torch.uint8).numpy().tobytes() == new.tobytes()
