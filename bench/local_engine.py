"""The `local` engine in bench/sidecar: how long it stands still for a commit, and how soon it answers after one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import urllib3

PROJECT, RUN = "bench", "sidecar"


def model(folder: Path) -> Path:
    """A BF16 checkpoint of SmolLM2-135M's shape with random weights and a vocabulary of words that are numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    network: Any = LlamaForCausalLM(config)
    network.to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{index}": index for index in range(49151)} | {"[UNK]": 49151}
    tokeniser = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokeniser, unk_token="[UNK]").save_pretrained(folder)
    return folder


def standing_still(checkpoint: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Pauses of commits into a running `local`, beside a whole load and a refill of the same image."""
    from mailboat.island.engines.local import LocalServer
    from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
    from mailboat.island.stop import Stop
    from scripts.engines.rig import Rig

    rig = Rig(checkpoint, folder / "rig")
    sidecar = Sidecar(EngineOptions("local", listen="127.0.0.1:0"), stop=Stop(), say=lambda _line: None)
    try:
        sidecar.engine.load(rig.image, rig.applied())
        pauses = []
        for _ in range(rounds):
            rig.step(sidecar)
            pauses.append(pause_of(str(sidecar.url)))
    finally:
        sidecar.close()
    loads: list[float] = []
    refills: list[float] = []
    for _ in range(3):
        server = LocalServer()
        try:
            for spent in (loads, refills):
                began = time.perf_counter()
                server.reload(rig.image)
                spent.append(time.perf_counter() - began)
        finally:
            server.close()
    rig.image.close()
    return {
        "pause_local_s": round(median(pauses), 4),
        "reload_local_s": round(median(loads), 4),
        "refill_local_s": round(median(refills), 4),
    }


def pause_of(url: str) -> float:
    """The last pause, as the sidecar tells it."""
    return float(json.loads(urllib3.request("GET", f"{url}/server_info").data)["metrics"]["pause_seconds"])


# -- from the commit to the first answer


def answered(checkpoint: Path, folder: Path, rounds: int) -> float:
    """Median seconds from a trainer's commit call to the first answer by the new version, all on this machine."""
    from controlplane.embedded.postgres import remove
    from controlplane.embedded.stack import Stack

    for name in [name for name in os.environ if name.startswith(("MAILBOAT_", "DATABASE_URL"))]:
        del os.environ[name]
    home = folder / "home"
    os.environ |= {"MAILBOAT_HOME": str(home), "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder.chmod(0o711)  # the account of the embedded PostgreSQL passes through
    try:
        with Stack(home, port) as stack:
            stack.wait_ready()
            return _answered(stack.url, checkpoint, folder, rounds)
    finally:
        remove(home)


def _answered(server: str, checkpoint: Path, folder: Path, rounds: int) -> float:
    import django
    import torch
    from safetensors.torch import load_file

    from mailboat.client import Api
    from mailboat.trainer import Publisher

    django.setup()
    from controlplane.accounts import services as accounts
    from controlplane.registry import services as registry

    project = registry.create_project(PROJECT, actor="bench")
    tokens = {role: accounts.create_token(project, role, role, actor="bench")[1] for role in ("publisher", "operator")}
    operator = Api(server, PROJECT, tokens["operator"])
    operator.create_run(RUN)
    token = str(operator.create_enrolment_token(RUN, "local")["token"])
    tensors = load_file(checkpoint / "model.safetensors")
    side = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix in {".json", ".jinja"}}
    random = np.random.default_rng(1)
    spent = []
    with Publisher(server, PROJECT, RUN, tokens["publisher"], state_dir=folder / "publisher") as publisher:
        publisher.publish(tensors, side_files=side).wait_ready(600)
        with _island(server, token, folder) as url:
            _ask(url, 0, 600)
            for _ in range(rounds):
                for tensor in tensors.values():
                    bits = tensor.view(-1).view(torch.int16).numpy()
                    where = random.integers(0, bits.size, max(1, bits.size // 500))
                    bits[where] ^= random.integers(1, 32, where.size).astype(np.int16)
                began: list[float] = []
                with _noting(began):
                    number = publisher.publish(tensors, wait=False).number
                _ask(url, number, 120)
                spent.append(time.perf_counter() - began[0])
    return round(median(spent), 3)


@contextmanager
def _noting(began: list[float]) -> Iterator[None]:
    """Notes when the commit call is made: before it nobody can know of the version."""
    from mailboat.client import Api

    commit = Api.commit_version

    def noted(api: Api, *arguments: Any, **options: Any) -> Any:
        began.append(time.perf_counter())
        return commit(api, *arguments, **options)

    with patch.object(Api, "commit_version", noted):
        yield


@contextmanager
def _island(server: str, token: str, folder: Path) -> Iterator[str]:
    """An island with `local` in a process of its own; its sidecar's address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mailboat.cli", "island", "run", "--server", server, "--project", PROJECT,
        "--token", token, "--store", str(folder / "island"), "--engine", "local", "--listen", f"127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "island.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _ask(url: str, version: int, seconds: float) -> None:
    """The first answer by a version or a newer one; asked again every few milliseconds until there is one."""
    pool, until = urllib3.PoolManager(retries=False), time.perf_counter() + seconds
    body = {"prompt": "w1 w2 w3", "max_tokens": 1, "weight_version": {"min_version": version}}
    while time.perf_counter() < until:
        try:
            if pool.request("POST", f"{url}/v1/completions", json=body, timeout=30).status == 200:
                return
        except urllib3.exceptions.HTTPError:
            time.sleep(0.2)  # it is not up yet
        time.sleep(0.005)
    raise TimeoutError(f"version {version} was not served within {seconds:g} s")
