"""Tensors that lie where the kernels run are published from there: the CPU's files, byte for byte, and never stale."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mailboat.digest import measure
from mailboat.errors import CheckpointError, InventoryMismatch
from mailboat.patch.backends import gpu_kernels
from mailboat.trainer import Publisher, PublishFailed, ServedWeights, follow, in_place
from mailboat.trainer.tensors import tensor_source
from tests.island.contract_server import PROJECT, RUN, ContractServer
from tests.island.fleet import held_state, island
from tests.kernels.conftest import WANTED

WHERE = {"interpreter": "cpu", "gpu": "cuda"}[WANTED]
Tensors = dict[str, Any]


@pytest.fixture
def servers() -> Iterator[tuple[ContractServer, ContractServer]]:
    """One for tensors that are compared where they lie, one for the same on the host."""
    with ContractServer().serving() as there, ContractServer().serving() as here:
        yield there, here


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its kernels take tensors on the CPU, in the interpreter."""
    monkeypatch.setenv("MAILBOAT_DEVICE", "interpreter" if WANTED == "interpreter" else "cpu")


@pytest.fixture(autouse=True)
def noticed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing was found in vain: the sums would notice, and everything be compared again. Tests of that clear it."""
    with caplog.at_level(logging.WARNING):
        yield
        assert not [record for record in caplog.get_records("call") if record.name.startswith("mailboat.trainer")]


def publisher(server: ContractServer, **options: Any) -> Publisher:
    return Publisher(server.address, PROJECT, RUN, "publisher", **options)


def there(tensors: Tensors) -> Tensors:
    """What torch has on the device, what NumPy has where it is."""
    return {name: value if isinstance(value, np.ndarray) else value.to(WHERE) for name, value in tensors.items()}


def publish_here(monkeypatch: pytest.MonkeyPatch, publisher: Publisher, tensors: Tensors) -> Any:
    """The same from the host's memory, by the CPU."""
    with monkeypatch.context() as patch:
        patch.setenv("MAILBOAT_DEVICE", "cpu")
        return publisher.publish(tensors)


def versions(seed: int = 0) -> list[Tensors]:
    """Served formats: few changes, many, almost none. FP8 codes with their scales come from the kernel. A NaN's payload
    and a zero's sign always change.
    """
    random = np.random.default_rng(seed)
    master = random.standard_normal((60, 67)).astype(np.float32)
    found = []
    for share, factor in [(0.0, 1.0), (0.02, 1.01), (0.6, 1.3), (0.0, 1.0)]:
        master = np.where(random.random(master.shape) < share, master * np.float32(factor), master)
        weights = torch.from_numpy(master.copy())
        codes = quantised(weights)
        odd = len(found) % 2
        weights.view(torch.int32)[0, 1:3] = torch.tensor([0x7FC1_0000 + (odd << 17), -odd << 31])
        found.append(
            {
                "bf16": weights.bfloat16(), "fp16": weights.half(), "fp32": weights.clone(),
                "t": weights.bfloat16().t(), "ids": (weights * 1000).long(), "bytes": (weights * 20).to(torch.int8),
                "scalar": weights[0, 0].bfloat16(), "empty": torch.zeros(0, 5),
                "complex": torch.complex(weights[:9], weights[9:18]), "host": master.copy(),
            }
            | codes
        )  # fmt: skip
    return found


def quantised(weights: torch.Tensor) -> Tensors:
    codes = torch.zeros(weights.shape, dtype=torch.uint8, device=WHERE)
    scales = torch.zeros((1, 1), device=WHERE)
    gpu_kernels("refresh").refresh_fp8(weights.to(WHERE), codes, scales, (128, 128))
    return {"fp8.weight": codes.view(torch.float8_e4m3fn).cpu(), "fp8.weight_scale_inv": scales.cpu()}


@pytest.mark.parametrize("device_bytes", [1 << 20, pytest.param(12000, marks=pytest.mark.long), 0])
def test_a28_a31_files_are_those_of_the_cpu(
    servers: tuple[ContractServer, ContractServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device_bytes: int,
) -> None:
    """With all old bytes on the device, some, and none; those that are not come in several pieces."""
    monkeypatch.setattr(in_place, "FEW", 8)
    monkeypatch.setattr(in_place, "PINNED_BYTES", 4096)
    monkeypatch.setattr(in_place, "SLICE", 3000)
    moved: list[int] = []
    to_host, read = in_place._to_host, in_place.OnDevice.read
    monkeypatch.setattr(in_place, "_to_host", lambda tensor: moved.append(tensor.nbytes) or to_host(tensor))
    monkeypatch.setattr(
        in_place.OnDevice, "read", lambda self, offset, out: moved.append(out.size) or read(self, offset, out)
    )
    with publisher(servers[0], device_bytes=device_bytes) as accelerated, publisher(servers[1]) as plain:
        for number, tensors in enumerate(versions()):
            if device_bytes != 12000:
                tensors = {name: tensors[name] for name in ("bf16", "fp32")}  # noqa: PLW2901 - fewer are enough
            moved.clear()
            version = accelerated.publish(there(tensors))
            expected = publish_here(monkeypatch, plain, tensors)
            assert (version.number, version.digest, version.changed) == (number, expected.digest, expected.changed)
            ours, theirs = (server.versions[number].manifest.patch for server in servers)
            assert (ours is None) == (number == 0)
            if ours is not None and theirs is not None:
                assert [part.sha256 for part in ours.parts] == [part.sha256 for part in theirs.parts]
            assert sum(moved) < version.full_bytes / 4 or number in {0, 2}, "changes travel, not tensors"
            assert sum(held.nbytes for held in accelerated._old._held.values()) <= device_bytes
    monkeypatch.setenv("MAILBOAT_DEVICE", "cpu")  # an island of another kind
    with island(servers[0], tmp_path / "store", once=True) as running:
        running.join()
    assert held_state(tmp_path / "store") == version.digest


def weights(seed: int = 0) -> Tensors:
    random = np.random.default_rng(seed)
    return there({name: torch.from_numpy(random.standard_normal((40, 33)).astype(np.float32)) for name in "ab"})


def digest_of(tensors: Any) -> str:
    return measure(tensor_source({name: value.cpu() for name, value in tensors.items()}, {})).digest


def test_old_bytes_follow_what_becomes_ready(servers: tuple[ContractServer, ContractServer]) -> None:
    server = servers[0]
    verdicts = {2: ("failed", "a part was damaged")}
    server.verdict = lambda manifest: verdicts.get(manifest.number, ("ready", ""))
    tensors = weights()
    with publisher(server) as accelerated:
        accelerated.publish(tensors)
        before = float(tensors["a"][3, 3])
        tensors["a"][3, 3] += 1
        assert accelerated.publish(tensors, wait=False).changed == 1
        tensors["a"][4, 4] += 1
        with pytest.raises(PublishFailed):
            accelerated.publish(tensors)
        tensors["a"][3, 3] = before  # what it was where old bytes did not follow: no change
        version = accelerated.publish(tensors)
        assert (version.number, version.changed) == (3, 2), "since the last ready version"
        assert version.digest == digest_of(tensors)


def test_old_bytes_that_are_not_what_they_should_be_are_noticed(
    servers: tuple[ContractServer, ContractServer], caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights()
    with publisher(servers[0]) as accelerated:
        accelerated.publish(tensors)
        accelerated.publish(tensors)
        accelerated._old._held[0][7] ^= 1  # as if it had changed in the same way as the tensor is about to
        tensors["a"].view(torch.int32).view(-1)[7] ^= 1
        version = accelerated.publish(tensors)
        assert (version.changed, version.digest) == (1, digest_of(tensors))
        assert "compared with the copy again: a changed" in caplog.text
        caplog.clear()


def test_a25_a26_a27_names_copies_and_tied_heads_are_checked_there(
    servers: tuple[ContractServer, ContractServer],
) -> None:
    tensors = weights()
    with publisher(servers[0]) as accelerated:
        accelerated.publish(tensors)
        with pytest.raises(InventoryMismatch):
            accelerated.publish({"a": tensors["a"]})
        with pytest.raises(CheckpointError, match="twice"):
            accelerated.publish([*tensors.items(), ("a", tensors["a"] + 1)])
        assert accelerated.publish([*tensors.items(), ("a", tensors["a"].clone())]).changed == 0
        with pytest.raises(CheckpointError, match="b is a list"):
            accelerated.publish({"a": tensors["a"], "b": [1.0]})
    embedded = {"model.embed_tokens.weight": tensors["a"], "lm_head.weight": tensors["a"].clone()}
    side = {"config.json": b'{"tie_word_embeddings": true}'}
    with publisher(servers[1]) as accelerated:
        version = accelerated.publish(embedded, side_files=side)
        assert version.elements == tensors["a"].numel()
        embedded["lm_head.weight"][0, 0] += 1
        with pytest.raises(CheckpointError, match="differ"):
            accelerated.publish(embedded)


# --- The view that follows an optimizer -------------------------------------------------------------------------------


class Training:
    """A small model whose served view follows its optimizer, and a publisher."""

    def __init__(self, server: ContractServer, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.net = nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 3)).to(WHERE)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5)
        self.served = follow(self.optimizer, self.net.named_parameters(), dtype=dtype)
        self.publisher = publisher(server)

    def step(self) -> None:
        self.net(torch.randn(4, 33, device=WHERE)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def expected(self) -> str:
        return digest_of({name: p.detach().to(self.dtype) for name, p in self.net.named_parameters()})


@pytest.fixture
def training(servers: tuple[ContractServer, ContractServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(in_place, "SLICE", 500)
    made = Training(servers[0])
    made.publisher.publish(made.served)
    yield made
    made.publisher.close()


def test_changes_that_the_hook_found_are_not_looked_for_again(
    training: Training, servers: tuple[ContractServer, ContractServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("the hook knows what changed")

    monkeypatch.setattr(gpu_kernels("changes"), "diff", forbidden)
    refused = {3, 4}
    servers[0].verdict = lambda manifest: ("failed", "damaged") if manifest.number in refused else ("ready", "")
    for number in range(1, 7):
        for _ in range(2 - number % 2):
            training.step()
        if number in refused:
            with pytest.raises(PublishFailed):
                training.publisher.publish(training.served)
            continue
        version = training.publisher.publish(training.served, wait=number != 2)
        assert (version.number, version.digest) == (number, training.expected())
    assert not training.publisher._old._held, "no old bytes are kept on the device"


OUTSIDE: dict[str, Callable[[Training], Any]] = {
    "in place": lambda t: t.net[0].weight.data.mul_(1.5),
    "another storage": lambda t: setattr(t.net[0].weight, "data", t.net[0].weight.data * 1.5),
    "state": lambda t: t.net.load_state_dict({k: v * 1.5 for k, v in t.net.state_dict().items()}),
    "before a skipped step": lambda t: (t.net[1].bias.data.add_(1), t.optimizer.zero_grad()),
}


@pytest.mark.parametrize("how", list(OUTSIDE))
def test_masters_that_change_outside_of_a_step_are_published_as_they_are(training: Training, how: str) -> None:
    training.step()
    OUTSIDE[how](training)
    version = training.publisher.publish(training.served)
    assert version.digest == training.expected()
    assert version.changed


def test_a_view_that_somebody_else_wrote_is_noticed(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Master and view change alike: comparing them finds nothing, and the trail knows nothing."""
    training.step()
    training.net[0].weight.data[2, 2] = 3.0
    training.served["0.weight"][2, 2] = 3.0
    version = training.publisher.publish(training.served)
    assert version.digest == training.expected()
    assert "0.weight changed in a way that was not noticed" in caplog.text
    caplog.clear()
    training.step()
    assert training.publisher.publish(training.served).digest == training.expected()


def test_a31_a_step_that_changes_everything_is_not_listed(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "FEW", 8)
    with torch.no_grad():
        for parameter in training.net.parameters():
            parameter.mul_(1.5)
    training.optimizer.zero_grad()
    training.step()
    assert "0.weight" not in training.served.since(training.served._target or "")
    version = training.publisher.publish(training.served)
    assert version.digest == training.expected()
    training.step()
    assert training.publisher.publish(training.served).digest == training.expected()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_views_of_other_dtypes_are_followed(
    servers: tuple[ContractServer, ContractServer], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """FP16 is cast by the hook, which then knows what changed; FP32 masters are compared like any other tensor."""
    training, compared = Training(servers[0], dtype), []
    diff = gpu_kernels("changes").diff
    with training.publisher as accelerated:
        accelerated.publish(training.served)
        monkeypatch.setattr(
            gpu_kernels("changes"), "diff", lambda *given, **named: compared.append(1) or diff(*given, **named)
        )
        for number in (1, 2):
            training.step()
            version = accelerated.publish(training.served)
            assert (version.number, version.digest) == (number, training.expected())
            assert version.changed
    assert bool(compared) == (dtype == torch.float32)


def test_masters_that_were_parted_are_refused() -> None:
    net = nn.Linear(33, 4).to(WHERE)
    served = ServedWeights({"a": net.weight, "b": net.weight.detach()})
    net.weight.data = net.weight.data * 2
    with pytest.raises(CheckpointError, match="a and b do not share"):
        served.refresh()
