"""What the local engine is asked: bodies of the OpenAI API, read strictly before anything is computed.

A field of the wrong type or out of its range is refused by one sentence; nothing is turned into something else in
silence. What the engine doesn't know is left alone, as other engines do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mailboat.island.engines.local_batch import Sampling

LONGEST = 4096  # tokens of prompt and answer together
MOST_SAMPLES = 64
COOLEST = 1e-4  # temperature: below, a division by it may overflow, and the answer is the greedy one anyway
MOST_LOGPROBS = 20
SEEDS = 1 << 63  # of either sign
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class BadRequest(ValueError):  # noqa: N818 - as HTTP calls it
    """A request that can't be answered; the text goes to the client."""


def body_of(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises BadRequest."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    except UnicodeEncodeError:
        raise BadRequest("The body holds a lone surrogate (\\ud800 to \\udfff), which is no character.") from None
    except (ValueError, RecursionError):
        raise BadRequest("The body must be JSON in UTF-8.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def sampling_of(body: dict[str, Any]) -> Sampling:
    """Reads the OpenAI fields; null counts as left out. Raises BadRequest."""
    for field in ("stream", "return_token_ids"):
        if not isinstance(body.get(field), bool | None):
            raise BadRequest(f"{field} must be true or false.")
    if not isinstance(body.get("model"), str | None):
        raise BadRequest("model must be a text.")
    if not isinstance(body.get("logprobs"), bool):
        _whole(body, "logprobs", 0, 0, MOST_LOGPROBS)
    field = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    temperature, top_p = _number(body, "temperature"), _number(body, "top_p")
    if temperature != 0 and temperature < COOLEST:
        raise BadRequest(f"temperature must be 0 (greedy) or at least {COOLEST}.")
    if not 0 < top_p <= 1:
        raise BadRequest("top_p must be above 0 and at most 1.")
    return Sampling(
        max_tokens=_whole(body, field, 16, 1, LONGEST),
        temperature=temperature,
        top_p=top_p,
        n=_whole(body, "n", 1, 1, MOST_SAMPLES),
        seed=None if body.get("seed") is None else _whole(body, "seed", 0, -SEEDS, SEEDS - 1),
        stop=_stops(body.get("stop")),
    )


def tokens_of(given: Sequence[Any], vocabulary: int) -> list[int]:
    """A prompt of token ids, each below `vocabulary`. Raises BadRequest."""
    if not all(type(token) is int and 0 <= token < vocabulary for token in given):
        raise BadRequest(f"prompt must be a text or a list of token ids from 0 to {vocabulary - 1}.")
    return list(given)


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation, each message's content as one text. Raises BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRequest(f"Each message must be an object with a role: {', '.join(ROLES)}.")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        content = ""  # a call of a tool says nothing beside
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequest("The content of a message must be a text or a list of text parts.")
    return message | {"content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _stops(given: Any) -> tuple[str, ...]:
    stops = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop must be a text or a list of texts, none of them empty.")
    return tuple(stops)


def _whole(body: dict[str, Any], field: str, default: int, least: int, most: int) -> int:
    value = default if body.get(field) is None else body[field]
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{field} must be a whole number from {least} to {most}.")
    return value


def _number(body: dict[str, Any], field: str) -> float:
    value = 1.0 if body.get(field) is None else body[field]
    try:
        if type(value) in {int, float} and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond all floats
        pass
    raise BadRequest(f"{field} must be a finite number.")
