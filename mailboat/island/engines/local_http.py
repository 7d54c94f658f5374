"""Generation and the OpenAI-style HTTP side of the local engine: enough for a demo, honest about what it can do.

One thread steps: requests join a batch when their prompt was worked through, each pass gives all of them their next
token, and none waits for another to end. Weights may be written only between two passes. Nothing here knows versions:
that is the sidecar's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from mailboat.island.engines.local_batch import MOST_ROWS, Batch, Job, Sample, Sampling
from mailboat.island.sidecar.serving import Address, HttpServer

LONGEST = 4096  # tokens of prompt and answer together
MOST_SAMPLES = 64


class BadRequest(ValueError):  # noqa: N818 - as HTTP calls it
    """A request that can't be answered; the text goes to the client."""


def sampling_of(body: dict[str, Any]) -> Sampling:
    """Reads the OpenAI fields. Raises BadRequest."""
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    try:
        found = Sampling(
            max_tokens=int(16 if limit is None else limit),
            temperature=float(1.0 if body.get("temperature") is None else body["temperature"]),
            top_p=float(1.0 if body.get("top_p") is None else body["top_p"]),
            n=int(body.get("n") or 1),
            seed=None if body.get("seed") is None else int(body["seed"]),
            stop=stops,
        )
    except (TypeError, ValueError):
        raise BadRequest("max_tokens, temperature, top_p, n and seed must be numbers.") from None
    if not (1 <= found.max_tokens <= LONGEST and 1 <= found.n <= MOST_SAMPLES and found.temperature >= 0):
        raise BadRequest(f"max_tokens must be 1 to {LONGEST}, n 1 to {MOST_SAMPLES}, temperature not negative.")
    return found


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
        if not prompt or len(prompt) + sampling.max_tokens > LONGEST:
            raise BadRequest(f"Prompt and max_tokens must be 1 to {LONGEST} tokens together.")
        job = Job(prompt, sampling, said, [Sample() for _ in range(sampling.n)])
        with self._change:
            self._arrived.append(job)
            self._change.notify_all()
        return job

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return list(self._tokeniser(text)["input_ids"])

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation. Raises BadRequest when the model has no template."""
        if not getattr(self._tokeniser, "chat_template", None):
            raise BadRequest("This model has no chat template; use /v1/completions.")
        text = self._tokeniser.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
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
            self._take(row.job, row.sample, token, score)
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
        from starlette.requests import Request
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
            try:
                body = json.loads(await request.body())
                if not isinstance(body, dict):
                    raise BadRequest("The body must be a JSON object.")
                running = self._begin(body, chat=chat)
            except ValueError as bad:
                return JSONResponse({"error": {"message": str(bad), "type": "BadRequestError"}}, 400)
            if body.get("stream"):
                return StreamingResponse(running.events(), media_type="text/event-stream")
            gone = asyncio.ensure_future(_disconnected(request))
            try:
                await running.end(gone)
            finally:
                gone.cancel()
            if running.job.error:
                return JSONResponse({"error": {"message": running.job.error, "type": "InternalServerError"}}, 500)
            return JSONResponse(running.whole())

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        routes = [
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", answer, methods=["POST"]),
            Route("/v1/chat/completions", answer, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def _begin(self, body: dict[str, Any], *, chat: bool) -> Running:
        sampling = sampling_of(body)
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise BadRequest("messages must be a list of messages.")
            prompt = self._generator.chat(messages)
        else:
            given = body.get("prompt")
            if isinstance(given, list) and all(isinstance(token, int) for token in given):
                prompt = given
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

    async def end(self, gone: asyncio.Future[None]) -> None:
        """Waits until it is done; a client that goes away ends it."""
        try:
            while not self.job.done:
                self._step.clear()
                waiting = asyncio.ensure_future(self._step.wait())
                either: list[asyncio.Future[Any]] = [waiting, gone]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if gone.done():
                    raise asyncio.CancelledError
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
                    yield _event({"error": {"message": self.job.error, "type": "InternalServerError"}})
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


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
