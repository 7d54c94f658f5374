"""Generation and the OpenAI-style HTTP side of the local engine: enough for a demo, honest about what it can do.

One thread steps: requests join a batch when their prompt was worked through, each pass gives all of them their next
token, and none waits for another to end. Weights may be written only between two passes. Nothing here knows versions:
that is the sidecar's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from mailboat.island.engines.local_batch import MOST_ROWS, Batch, Job, Sample, Sampling
from mailboat.island.engines.local_requests import (
    LONGEST,
    BadRequest,
    body_of,
    messages_of,
    sampling_of,
    tokens_of,
)
from mailboat.island.sidecar.serving import Address, HttpServer

_log = logging.getLogger(__name__)


class Generator:
    """The stepping thread, and the switch that makes it stand still."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokeniser: Any = None
        self._arrived: deque[Job] = deque()
        self._batches: list[Batch] = []  # one, unless a model's cache can't be shared
        self._change = threading.Condition()
        self._standing = False
        self._stepping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="local engine", daemon=True)
        self._thread.start()

    def _over(self) -> bool:
        return self._ended

    def use(self, model: Any, tokeniser: Any) -> None:
        """The model to step; called while it stands still."""
        self._model, self._tokeniser = model, tokeniser

    def pause(self) -> None:
        """Returns when no step is under way; none begins before `resume`."""
        with self._change:
            self._standing = True
            self._change.wait_for(lambda: not self._stepping)

    def resume(self) -> None:
        """Goes on where it stood."""
        with self._change:
            self._standing = False
            self._change.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join(10)

    def submit(self, prompt: list[int], sampling: Sampling, said: Callable[[], None]) -> Job:
        """Begins a request. Raises BadRequest."""
        longest = min(LONGEST, getattr(self._model.config, "max_position_embeddings", None) or LONGEST)
        if not prompt or len(prompt) + sampling.max_tokens > longest:
            raise BadRequest(f"The prompt must not be empty, and with max_tokens at most {longest} tokens long.")
        job = Job(prompt, sampling, said, [Sample() for _ in range(sampling.n)])
        with self._change:
            self._arrived.append(job)
            self._change.notify_all()
        return job

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return list(self._tokeniser(text)["input_ids"])

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation. Raises BadRequest when the model has no template, or one that refuses."""
        if not getattr(self._tokeniser, "chat_template", None):
            raise BadRequest("This model has no chat template; use /v1/completions.")
        try:
            text = self._tokeniser.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program that came with the weights
            said = " ".join(str(error).split()).rstrip(".")
            raise BadRequest(f"The model's chat template refuses these messages: {said}.") from error
        return list(self._tokeniser(text, add_special_tokens=False)["input_ids"])

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._over() or self._arrived or self._batches)
                if self._over():
                    return
            while self._arrived and sum(len(batch.rows) for batch in self._batches) < MOST_ROWS:
                if not self._between_commits(partial(self._begin, self._arrived.popleft())):
                    return
            for batch in list(self._batches):
                if not self._between_commits(partial(self._advance, batch)):
                    return

    def _between_commits(self, work: Callable[[], list[Job]]) -> bool:
        """One pass, when nothing stands still; its requests hear of it. False when the engine ends."""
        with self._change:
            self._change.wait_for(lambda: self._over() or not self._standing)
            if self._over():
                return False
            self._stepping = True
        try:
            import torch

            with torch.inference_mode():
                touched = work()
        finally:
            with self._change:
                self._stepping = False
                self._change.notify_all()
        for job in touched:
            job.said()
        return True

    def _begin(self, job: Job) -> list[Job]:
        """A new request: its prompt and its first token; then it joins the others."""
        if job.cancelled:
            return []
        try:
            batch = Batch(self._model, job)
            self._give_tokens(batch)
            host = next((other for other in self._batches if other.takes(batch)), None)
            if batch.rows and host is not None:
                host.join(batch)
            elif batch.rows:
                self._batches.append(batch)
        except Exception as error:  # noqa: BLE001 - one request's trouble is not another's
            job.error = f"{type(error).__name__}: {error}"
        return [job]

    def _advance(self, batch: Batch) -> list[Job]:
        """The next token of every row."""
        batch.drop_ended()  # clients that went away
        jobs = batch.jobs
        try:
            if batch.rows:
                batch.step(self._model)
                self._give_tokens(batch)
        except Exception as error:  # noqa: BLE001 - it may be memory: what comes next gets its chance
            for job in jobs:
                job.error = f"{type(error).__name__}: {error}"
            batch.rows = []
        if not batch.rows:
            self._batches.remove(batch)
        return jobs

    def _give_tokens(self, batch: Batch) -> None:
        for row, token, score in zip(batch.rows, *batch.choose(), strict=True):
            try:
                if not row.over:
                    self._take(row.job, row.sample, token, score)
            except Exception as error:  # noqa: BLE001 - one request's trouble is not another's
                row.job.error = f"{type(error).__name__}: {error}"
        batch.drop_ended()

    def _take(self, job: Job, sample: Sample, token: int, score: float) -> None:
        if token in self._ends():
            sample.reason = "stop"
            return
        sample.tokens.append(token)
        sample.logprobs.append(score)
        text = self._tokeniser.decode(sample.tokens, skip_special_tokens=True)
        cuts = [at for stop in job.sampling.stop if (at := text.find(stop)) >= 0]
        if cuts:
            sample.text, sample.reason = text[: min(cuts)], "stop"
            return
        if len(sample.tokens) >= job.sampling.max_tokens:
            sample.text, sample.reason = text, "length"
        elif not text.endswith("\ufffd"):  # half of a character waits for its other half
            sample.text = text

    def _ends(self) -> set[int]:
        found = self._model.generation_config.eos_token_id
        own = self._tokeniser.eos_token_id
        listed = found if isinstance(found, list) else [found]
        return {token for token in [*listed, own] if token is not None}


class LocalHttp:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` on a loopback port."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._server = HttpServer("local engine", Address("127.0.0.1", 0), grace=5)
        self.url = self._server.url
        self._server.start(self._application)

    def close(self) -> None:
        """Ends it."""
        self._server.stop()

    def _application(self, started: Callable[[], None]) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route

        async def health(_request: Request) -> Response:
            return Response()

        async def models(_request: Request) -> Response:
            return JSONResponse(
                {"object": "list", "data": [{"id": "local", "object": "model", "owned_by": "mailboat"}]}
            )

        async def answer(request: Request) -> Response:
            chat = request.url.path.endswith("/chat/completions")
            body = body_of(await request.body())
            running = self._begin(body, chat=chat)
            if body.get("stream"):
                return StreamingResponse(running.events(), media_type="text/event-stream")
            gone = asyncio.ensure_future(_disconnected(request))
            try:
                there = await running.end(gone)
            finally:
                gone.cancel()
            if not there:
                return Response()  # nobody reads it
            if running.job.error:
                return JSONResponse(_error(running.job.error), 500)
            return JSONResponse(running.whole())

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except BadRequest as bad:
                return JSONResponse(_error(str(bad), "BadRequestError"), 400)
            except ClientDisconnect:
                return Response()
            except Exception as error:  # noqa: BLE001 - one line of the log a request, not a traceback
                said = f"{type(error).__name__}: {error}"
                _log.error("%s: %s", request.url.path, " ".join(said.split()))
                return JSONResponse(_error(said), 500)

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        routes = [
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", guarded, methods=["POST"]),
            Route("/v1/chat/completions", guarded, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def _begin(self, body: dict[str, Any], *, chat: bool) -> Running:
        sampling = sampling_of(body)
        given = body.get("prompt")
        if chat:
            prompt = self._generator.chat(messages_of(body))
        elif isinstance(given, list):
            prompt = tokens_of(given, self._generator.vocabulary)
        elif isinstance(given, str):
            prompt = self._generator.encode(given)
        else:
            raise BadRequest("prompt must be a text or a list of token ids; send one prompt per request.")
        loop, step = asyncio.get_running_loop(), asyncio.Event()

        def said() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(step.set)

        return Running(self._generator.submit(prompt, sampling, said), step, body, chat)


class Running:
    """An answer under way, in the shapes of the OpenAI API."""

    def __init__(self, job: Job, step: asyncio.Event, body: dict[str, Any], chat: bool) -> None:
        self.job = job
        self._step = step
        self._chat = chat
        self._model = str(body.get("model") or "local")
        self._logprobs = bool(body.get("logprobs"))
        self._token_ids = bool(body.get("return_token_ids"))
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def end(self, gone: asyncio.Future[None]) -> bool:
        """Waits until it is done; a client that goes away ends it. Returns whether the client is still there."""
        try:
            while not self.job.done:
                self._step.clear()
                waiting = asyncio.ensure_future(self._step.wait())
                either: list[asyncio.Future[Any]] = [waiting, gone]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    return False
            return True
        finally:
            self.job.cancelled = True  # harmless when done

    async def events(self) -> AsyncIterator[bytes]:
        """The stream of events, `[DONE]` at its end."""
        sent = [0] * len(self.job.samples)
        ended = [False] * len(self.job.samples)
        try:
            while not all(ended):
                self._step.clear()
                if self.job.error:
                    yield _event(_error(self.job.error))
                    return
                for index, sample in enumerate(self.job.samples):
                    reason, text = sample.reason, sample.text
                    if len(text) > sent[index] or (reason and not ended[index]):
                        yield _event(self._shell() | {"choices": [self._choice(index, text[sent[index] :], reason)]})
                        sent[index], ended[index] = len(text), reason is not None
                if not all(ended):
                    await self._step.wait()
            yield b"data: [DONE]\n\n"
        finally:
            self.job.cancelled = True

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        answered = sum(len(sample.tokens) for sample in self.job.samples)
        asked = len(self.job.prompt)
        usage = {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
        choices = [self._full(index, sample) for index, sample in enumerate(self.job.samples)]
        return self._shell(whole=True) | {"choices": choices, "usage": usage}

    def _full(self, index: int, sample: Sample) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": sample.text}} if self._chat else {"text": sample.text}
        choice: dict[str, Any] = {"index": index, **said, "finish_reason": sample.reason}
        if self._logprobs:
            choice["logprobs"] = {"token_logprobs": sample.logprobs}
        if self._token_ids:
            choice |= {"token_ids": sample.tokens, "prompt_token_ids": self.job.prompt}
        return choice

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        return {"index": index, **said, "finish_reason": reason}

    def _shell(self, *, whole: bool = False) -> dict[str, Any]:
        kind = ("chat.completion" if whole else "chat.completion.chunk") if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def _error(text: str, kind: str = "InternalServerError") -> dict[str, Any]:
    return {"error": {"message": text, "type": kind}}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
