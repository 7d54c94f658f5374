"""Engines that behave as vLLM and SGLang are documented to, traps included, with a model whose tokens name its weights.

The weights are real: a torch module in vLLM's fused layout, loaded from a checkpoint folder or written in place through
the real worker extension. The first element of `model.norm.weight` is the version; every token says it as it is at that
moment, and a prefix cache remembers under which version a prompt was computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mailboat.checkpoint.files import Checkpoint
from mailboat.island.engines.vllm_extension import MailboatWorker
from mailboat.island.sidecar.serving import Address, HttpServer

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, PADDED = 16, 4, 2, 4, 32, 50, 64
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
}


# The routes that generate, and those of them whose requests carry the key of the prefix cache to where it counts.
GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/v1/messages", "/inference/v1/generate",
    "/v1/embeddings", "/v2/embed", "/score", "/v1/audio/transcriptions", "/tokenize",
)  # fmt: skip
CARRYING = {
    "vllm": ("cache_salt", {*GENERATING} - {"/generate", "/v2/embed", "/v1/audio/transcriptions", "/tokenize"}),
    "sglang": ("extra_key", {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"}),
}


class Layer(torch.nn.Module):
    """A linear layer with the attributes that vLLM's have."""

    def __init__(self, rows: int, columns: int | None, **attributes: Any) -> None:
        super().__init__()
        shape = (rows,) if columns is None else (rows, columns)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


class QKVParallelLinear(Layer):
    pass


class MergedColumnParallelLinear(Layer):
    pass


class RowParallelLinear(Layer):
    pass


class Indices:
    def __init__(self, first: int, last: int) -> None:
        self.org_vocab_start_index, self.org_vocab_end_index = first, last


def fused_model(rank: int = 0, size: int = 1) -> torch.nn.Module:
    """One rank's part of the model."""
    tp = {"tp_rank": rank, "tp_size": size}
    heads, kv = HEADS // size, max(1, KV_HEADS // size)
    replicas = max(1, size // KV_HEADS)
    part = PADDED // size
    first, last = min(rank * part, VOCAB), min((rank + 1) * part, VOCAB)
    attention, mlp, layer, inner, model = (torch.nn.Module() for _ in range(5))
    attention.qkv_proj = QKVParallelLinear(
        (heads + 2 * kv) * HEAD, HIDDEN, head_size=HEAD, num_heads=heads, num_kv_heads=kv,
        num_kv_head_replicas=replicas, **tp,
    )  # fmt: skip
    attention.o_proj = RowParallelLinear(HIDDEN, HEADS * HEAD // size, **tp)
    mlp.gate_up_proj = MergedColumnParallelLinear(2 * INNER // size, HIDDEN, output_sizes=[INNER, INNER], **tp)
    mlp.down_proj = RowParallelLinear(HIDDEN, INNER // size, **tp)
    layer.self_attn, layer.mlp = attention, mlp
    inner.embed_tokens = Layer(part, HIDDEN, shard_indices=Indices(first, last), **tp)
    inner.layers = torch.nn.ModuleList([layer])
    inner.norm = Layer(HIDDEN, None)
    model.model = inner
    model.lm_head = inner.embed_tokens  # tied
    return model


class Worker(MailboatWorker):
    """A vLLM worker, as far as the extension sees one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.model_runner = type("Runner", (), {})()
        self.model_runner.model = fused_model(rank, size)

    def reload_weights(self, weights_path: str) -> None:
        """Reads a folder and cuts its own part out: the long way, written apart from the extension's."""
        with Checkpoint.open(Path(weights_path)) as checkpoint:
            full = {}
            for index, tensor in enumerate(checkpoint.inventory.tensors):
                data = np.empty(tensor.nbytes, np.uint8)
                checkpoint.read(index, 0, data)
                full[tensor.name] = torch.from_numpy(data).view(torch.bfloat16).reshape(tensor.shape)
        rank, size, inner = self.rank, self.size, self.model_runner.model.model
        cut = lambda name, dim=0: full[name].chunk(size, dim)[rank]  # noqa: E731
        layer = "model.layers.0."
        keys = [
            full[f"{layer}self_attn.{name}.weight"].chunk(min(size, KV_HEADS))[rank * min(size, KV_HEADS) // size]
            for name in ("k_proj", "v_proj")
        ]
        block = inner.layers[0]
        block.self_attn.qkv_proj.weight.copy_(torch.cat([cut(f"{layer}self_attn.q_proj.weight"), *keys]))
        block.self_attn.o_proj.weight.copy_(cut(f"{layer}self_attn.o_proj.weight", 1))
        gate_up = [cut(f"{layer}mlp.{name}.weight") for name in ("gate_proj", "up_proj")]
        block.mlp.gate_up_proj.weight.copy_(torch.cat(gate_up))
        block.mlp.down_proj.weight.copy_(cut(f"{layer}mlp.down_proj.weight", 1))
        padded = torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16)
        padded[:VOCAB] = full["model.embed_tokens.weight"]
        inner.embed_tokens.weight.copy_(padded.chunk(size)[rank])
        inner.norm.weight.copy_(full["model.norm.weight"])

    @property
    def version(self) -> int:
        """What the weights say that they are."""
        return int(self.model_runner.model.model.norm.weight.view(torch.int16)[0])


class ContractEngine:
    """One engine on a port. ``extension``: whether the workers have Mailboat's; ``ranks``: tensor-parallel workers."""

    def __init__(
        self,
        kind: str,
        *,
        extension: bool = True,
        ranks: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        token_seconds: float = 0.004,
    ) -> None:
        self.kind = kind
        self.key, self.carrying = CARRYING[kind]
        self.extension = extension
        self.workers = [Worker(rank, ranks) for rank in range(ranks)]
        self.token_seconds = token_seconds
        self.unending: float = math.inf  # answers of so many tokens get their last one when this is raised
        self.label = "default"
        self.calls: list[str] = []
        self.faults: dict[str, str] = {}  # path or method -> "500", "hang", "refuse", "corrupt"
        self.aborted = 0
        self.finished = 0
        self.disconnected = 0
        self.resident: set[int] = set()
        self.seen: list[dict[str, Any]] = []
        self.cache: dict[tuple[str, str], int] = {}
        self.outside: str | None = "held by a connector"
        self.paused = False
        self.asleep = 0  # the level
        self.broken = False  # touched while asleep
        self._aborting = 0
        self._numbers = iter(range(1 << 30))
        self.released = threading.Event()
        self.server = HttpServer(f"{kind} engine", Address(host, port), grace=1)

    @property
    def url(self) -> str:
        return self.server.url

    @contextlib.contextmanager
    def serving(self) -> Iterator[ContractEngine]:
        self.start()
        try:
            yield self
        finally:
            self.released.set()
            self.server.stop()

    def start(self) -> None:
        self.server.start(self._application)

    def restart(self) -> None:
        """What a crash and a supervisor make of it: other weights, no label, nothing resident."""
        for worker in self.workers:
            worker.model_runner.model = fused_model(worker.rank, worker.size)
            worker._mailboat = worker._mailboat_stage = None
        self.label, self.paused, self.cache = "default", False, {}

    @property
    def version(self) -> int:
        return self.workers[0].version

    # -- generation

    async def generate(self, prompt: str, salt: str, count: int) -> AsyncIterator[tuple[str, int | None]]:
        number, epoch = next(self._numbers), self._aborting
        self.resident.add(number)
        try:
            cached = self.cache.setdefault((salt, prompt), self.version)
            for index in range(count):
                while (self.paused or self.unending <= count == index + 1) and epoch == self._aborting:
                    await asyncio.sleep(0.001)
                if epoch != self._aborting:
                    self.aborted += 1
                    yield "", None
                    return
                yield f"{self.version} ", cached if index == 0 else None
                await asyncio.sleep(self.token_seconds)
            self.finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.disconnected += 1
            raise
        finally:
            self.resident.discard(number)

    async def _completion(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw.startswith(b"{") else {"prompt": raw.decode()}
        self.seen.append(body)
        if self.faults.get(request.url.path) == "500":
            return Response("broken", 500)
        own = body.get("cache_salt")
        if self.kind == "vllm" and own is not None and not _salt_fits(own):
            return JSONResponse({"error": {"type": "BadRequestError", "message": f"cache_salt: {own!r}"}}, 400)
        salt = str(body.get(self.key) or "") if request.url.path in self.carrying else ""
        prompt = str(body.get("prompt") or body.get("text") or body.get("messages"))
        count = int(body.get("max_tokens") or (body.get("sampling_params") or {}).get("max_new_tokens") or 8)
        tokens = self.generate(prompt, salt, count)
        shape = self._sglang if request.url.path == "/generate" else self._openai
        if body.get("stream"):
            return StreamingResponse(self._events(tokens, shape), media_type="text/event-stream")
        gone = asyncio.ensure_future(_gone(request))
        text, cached = "", None
        work = asyncio.ensure_future(_collect(tokens))
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return Response(status_code=499)
        gone.cancel()
        text, cached, reason = work.result()
        return JSONResponse(shape(text, reason) | {"cached_under": cached})

    async def _events(
        self, tokens: AsyncIterator[tuple[str, int | None]], shape: Callable[..., dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        reason = "stop"
        async for text, _ in tokens:
            if not text:
                reason = "abort"
                break
            yield b"data: " + json.dumps(shape(text, None)).encode() + b"\n\n"
        yield b"data: " + json.dumps(shape("", reason)).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _openai(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}

    def _sglang(self, text: str, reason: str | None) -> dict[str, Any]:
        finish = None if reason is None else {"type": reason}
        return {"text": text, "meta_info": {"weight_version": self.label, "finish_reason": finish}}

    def _abort_all(self) -> None:
        self._aborting += 1

    # -- control

    def _application(self, started: Callable[[], None]) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        control = self._vllm() if self.kind == "vllm" else self._sglang_routes()
        generation = [Route(path, self._completion, methods=["POST"]) for path in GENERATING]
        routes = [Route(path, self._guard(path, call), methods=["GET", "POST"]) for path, call in control.items()]
        return Starlette(routes=[*generation, *routes], lifespan=lifespan)

    def _guard(self, path: str, call: Callable[[Request, dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            raw = await request.body()
            body = json.loads(raw) if raw else {}
            name = body.get("method") or path
            if path not in {"/health", "/weight_info", "/model_info", "/is_sleeping", "/metrics", "/openapi.json"}:
                self.calls.append(name)
            fault = self.faults.get(name) or self.faults.get(path)
            if fault == "500":
                return Response("broken", 500)
            if fault == "hang":
                while not self.released.is_set() and self.faults.get(name) == "hang":
                    await asyncio.sleep(0.01)
                return Response("late", 500)
            if fault == "refuse":
                return JSONResponse({"error": "no"}, 400)
            if fault == "unsuccessful":
                return JSONResponse({"success": False, "message": "out of memory"})
            answer = call(request, body)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return guarded

    def _vllm(self) -> dict[str, Callable[[Request, dict[str, Any]], Any]]:
        def pause(request: Request, _body: dict[str, Any]) -> Any:
            mode = request.query_params.get("mode", "abort")
            self.paused = True
            if mode == "abort":
                self._abort_all()
            return {"status": "paused"}

        def resume(_request: Request, _body: dict[str, Any]) -> Any:
            self.paused, self.broken = False, self.broken or bool(self.asleep)
            return {"status": "resumed"}

        def rpc(_request: Request, body: dict[str, Any]) -> Any:
            method = body["method"]
            if self.asleep and method in {"reload_weights", "mailboat_write", "mailboat_repack", "mailboat_sums"}:
                self.broken = True
                return Response("segmentation fault", 500)
            if method.startswith("mailboat_") and not self.extension:
                return Response("Internal Server Error", 500)
            results = [
                getattr(worker, method)(*body.get("args", []), **body.get("kwargs", {})) for worker in self.workers
            ]
            if self.faults.get(f"after {method}") == "corrupt":
                self.workers[0].model_runner.model.model.norm.weight.view(torch.int16)[1] ^= 1
                del self.faults[f"after {method}"]
                if method == "mailboat_write":
                    results[0]["sums"][0][1] = "12345"
            return {"results": results}

        def sleep(request: Request, _body: dict[str, Any]) -> Any:
            self.asleep, self.paused = int(request.query_params.get("level", "1")), True
            if self.asleep == 2:  # the weights are discarded
                for parameter in (one for worker in self.workers for one in worker.model_runner.model.parameters()):
                    parameter.zero_()
            return {}

        def wake(_request: Request, _body: dict[str, Any]) -> Any:
            self.asleep, self.paused = 0, False
            return {}

        def reset(request: Request, _body: dict[str, Any]) -> Any:
            if self.resident:
                return {"success": False}
            self.cache.clear()
            if request.query_params.get("reset_external") == "true":
                self.outside = None
            return {"success": True}

        def relabel(_request: Request, body: dict[str, Any]) -> Any:
            self.label = body["new_version"]
            return {"success": True}

        return {
            "/health": lambda *_: {},
            "/pause": pause,
            "/resume": resume,
            "/is_paused": lambda *_: {"is_paused": self.paused},
            "/sleep": sleep,
            "/wake_up": wake,
            "/is_sleeping": lambda *_: {"is_sleeping": self.paused or bool(self.asleep)},
            "/metrics": lambda *_: Response(
                "# TYPE vllm:engine_sleep_state gauge\n"
                f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="awake"}} {float(not self.asleep)}\n'
                f'vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} {float(self.asleep == 2)}\n'
            ),
            "/collective_rpc": rpc,
            "/reset_prefix_cache": reset,
            "/reset_encoder_cache": lambda *_: {},
            "/openapi.json": lambda *_: self._described(),
            "/update_weight_version": relabel,
            "/weight_info": lambda *_: {"weight_version": self.label},
        }

    def _described(self) -> dict[str, Any]:
        """As FastAPI writes it: what a body may hold lies behind a reference."""
        named = {path: path.strip("/").replace("/", "_") for path in GENERATING}
        bodies = {
            path: {"application/json": {"schema": {"$ref": f"#/components/schemas/{named[path]}"}}} for path in named
        }
        schemas = {
            named[path]: {"type": "object", "properties": {self.key: {}} if path in self.carrying else {}}
            for path in GENERATING
        }
        return {
            "paths": {path: {"post": {"requestBody": {"content": content}}} for path, content in bodies.items()},
            "components": {"schemas": schemas},
        }

    def _sglang_routes(self) -> dict[str, Callable[[Request, dict[str, Any]], Any]]:
        def pause(_request: Request, body: dict[str, Any]) -> Any:
            self.paused = True
            if body.get("mode", "abort") == "abort":
                self._abort_all()
            return {"status": "ok"}

        def go_on(_request: Request, _body: dict[str, Any]) -> Any:
            self.paused = False
            return {"status": "ok"}

        def flush(*_: Any) -> Any:
            if self.resident:
                return Response("Cache not flushed because there are pending requests.", 400)
            self.cache.clear()
            return Response("Cache flushed.")

        def update(_request: Request, body: dict[str, Any]) -> Any:
            if body.get("abort_all_requests", False):
                self._abort_all()
            for worker in self.workers:
                worker.reload_weights(body["model_path"])
            if body.get("flush_cache", True):
                if self.resident:
                    return Response("AssertionError: cache flush failed after updating weights", 500)
                self.cache.clear()
            self.label = body.get("weight_version", self.label)
            return {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": len(self.resident),
            }

        def relabel(_request: Request, body: dict[str, Any]) -> Any:
            if body.get("abort_all_requests", True):
                self._abort_all()
            self.label = body["new_version"]
            return {"success": True}

        return {
            "/health": lambda *_: {},
            "/model_info": lambda *_: {"model_path": "/x", "weight_version": self.label},
            "/pause_generation": pause,
            "/continue_generation": go_on,
            "/flush_cache": flush,
            "/update_weights_from_disk": update,
            "/update_weight_version": relabel,
        }


def _salt_fits(salt: Any) -> bool:
    """vLLM's rule (0.32): it goes into keys and paths of cache connectors."""
    return isinstance(salt, str) and 0 < len(salt) <= 128 and not set(salt) & set("@/\\\0")


async def _collect(tokens: AsyncIterator[tuple[str, int | None]]) -> tuple[str, int | None, str]:
    pieces, first, reason = [], None, "stop"
    async for text, cached in tokens:
        first = cached if cached is not None else first
        reason = "stop" if text else "abort"
        pieces.append(text)
    return "".join(pieces), first, reason


async def _gone(request: Request) -> None:
    while (await request._receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    """`python -m tests.engines.contract_engine KIND PORT`: a process that can be killed."""
    engine = ContractEngine(sys.argv[1], port=int(sys.argv[2]))
    engine.start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
