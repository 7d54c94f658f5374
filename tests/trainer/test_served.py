"""The served view that follows an optimizer: the bits of a cast, and only what changed is written."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from kernels import reference
from mailboat.errors import CheckpointError
from mailboat.trainer import ServedWeights, follow
from mailboat.trainer.tensors import tensor_source


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().bfloat16().view(torch.int16)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 33)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))


@pytest.mark.parametrize(("kind", "rate"), [(torch.optim.AdamW, 1e-4), (torch.optim.SGD, 0.1)])
def test_the_view_follows_every_step(kind: type[torch.optim.Optimizer], rate: float) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=rate)
    served = follow(optimizer, net.named_parameters())
    for _ in range(4):
        before = {name: tensor.view(torch.int16).clone() for name, tensor in served.items()}
        train(net, optimizer)
        changed = 0
        for name, parameter in net.named_parameters():
            assert torch.equal(served[name].view(torch.int16), bits(parameter))
            changed += int((before[name] != bits(parameter)).sum())
        assert served.last is not None
        assert served.last.changed == changed > 0
        assert served.last.elements == sum(p.numel() for p in net.parameters())
        assert 0 < served.last.seconds < 60


def test_a28_a_view_in_fp16_follows_every_step() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    served = follow(optimizer, net.named_parameters(), dtype=torch.float16)
    assert {t.dtype for t in tensor_source(served, {}).inventory.tensors} == {"F16"}
    for _ in range(3):
        before = {name: tensor.view(torch.int16).clone() for name, tensor in served.items()}
        train(net, optimizer)
        changed = 0
        for name, parameter in net.named_parameters():
            expected = parameter.detach().half().view(torch.int16)
            assert torch.equal(served[name].view(torch.int16), expected)
            changed += int((before[name] != expected).sum())
        assert served.last is not None and served.last.changed == changed > 0


def test_a28_nan_payloads_and_negative_zero_are_bits() -> None:
    master = torch.tensor([0x7FC1_2345, -0x0040_0001, -0x8000_0000, 0], dtype=torch.int32).view(torch.float32)
    served = ServedWeights({"x": master})
    assert served["x"].view(torch.int16).tolist() == [0x7FC1, -0x0041 | 0x40, -0x8000, 0]
    assert served.refresh().changed == 0
    master[3] = -0.0
    assert served.refresh().changed == 1
    assert served["x"].view(torch.int16).tolist()[3] == -0x8000


def test_a26_tied_weights_share_one_view() -> None:
    net = model()
    tied = dict(net.named_parameters()) | {"head.weight": net[0].weight}
    served = ServedWeights(tied)
    assert served["head.weight"].data_ptr() == served["0.weight"].data_ptr()
    source = tensor_source(served, {})
    assert source.inventory.aliases == {"head.weight": "0.weight"}
    assert {t.dtype for t in source.inventory.tensors} == {"BF16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_of_the_served_dtype_are_their_own_view(dtype: torch.dtype) -> None:
    parameter = torch.ones(4, dtype=dtype)
    served = ServedWeights({"x": parameter}, dtype=dtype)
    assert served["x"].data_ptr() == parameter.data_ptr()
    parameter.add_(1)
    assert served.refresh().changed == 0
    assert [tensor.dtype for tensor in tensor_source(served, {}).inventory.tensors] == [
        {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    ]


def test_a28_views_in_fp16_have_the_bits_of_the_kernels_twin() -> None:
    random = np.random.default_rng(0)
    master = random.integers(0, 1 << 32, 1 << 16, np.uint32)  # a sixteenth lies in the range of FP16, the rest beyond
    master[: 1 << 15] = random.integers(100 << 23, 144 << 23, 1 << 15, np.uint32) | (master[: 1 << 15] & (1 << 31))
    served = ServedWeights({"x": torch.from_numpy(master.view(np.float32))}, dtype=torch.float16)
    twin = reference.to_fp16(master)
    assert served["x"].view(torch.int16).numpy().tobytes() == twin.tobytes()
    master[5::100] ^= np.uint32(1 << 31)
    changed = np.count_nonzero(reference.to_fp16(master) != twin)
    assert served.refresh().changed == changed > 0
    assert served["x"].view(torch.int16).numpy().tobytes() == reference.to_fp16(master).tobytes()


def test_other_masters_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"x is a torch\.float64"):
        ServedWeights({"x": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"x is a torch\.bfloat16"):
        ServedWeights({"x": torch.ones(2, dtype=torch.bfloat16)}, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="choose BF16, FP16 or FP32"):
        ServedWeights({"x": torch.ones(2)}, dtype=torch.float64)
    with pytest.raises(CheckpointError, match="only dense"):
        ServedWeights({"x": torch.ones(4, 4).t()})


@pytest.mark.parametrize("how", ["double", "half", "bfloat16", "resized"])
def test_masters_that_became_others_are_refused(how: str) -> None:
    """Their memory does not hold what the view was made of any more."""
    net = model()
    served = ServedWeights(net.named_parameters())
    view = served["0.weight"]
    before = view.clone()
    if how == "resized":
        net[0].weight.data = torch.zeros(99, 33)
    else:
        getattr(net, how)()
    with pytest.raises(CheckpointError, match=r"0\.weight was torch\.float32 with 561 elements on cpu"):
        served.refresh()
    assert torch.equal(view, before)


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_under_ddp_and_fsdp2(one_rank: None, how: str) -> None:
    net = model()
    if how == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    served = follow(optimizer, net.named_parameters())
    for _ in range(2):
        train(wrapped, optimizer)
        assert served.last is not None and served.last.changed > 0
        for name, parameter in net.named_parameters():
            whole = parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter
            view = served[name]
            view = view.full_tensor() if hasattr(view, "full_tensor") else view
            assert torch.equal(view.view(torch.int16), bits(whole))
        assert len(tensor_source(served, {}).inventory.tensors) == 4


def test_a_resident_view_is_followed_and_published_without_another_copy() -> None:
    net = nn.Sequential(nn.Embedding(1 << 14, 256), nn.Linear(256, 8))  # 8 MiB of BF16 in one tensor
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    served = follow(optimizer, net.named_parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # whatever is made once, is made
    tracemalloc.start()  # NumPy's memory is counted
    try:
        optimizer.step()
        source = tensor_source(served, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert served.last is not None and served.last.changed > served.last.elements // 2
    assert peak < 6 << 20, "a step needs room for a piece of a tensor, not for a tensor"
    for index, tensor in enumerate(source.inventory.tensors):
        assert source.view(index).ctypes.data == served[tensor.name].data_ptr()
