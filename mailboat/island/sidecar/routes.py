"""Which paths of an engine the world may call.

What changes an engine is the sidecar's alone. An engine's control surface grows with each release, and some of it
answers GET as well as POST, so whatever the method a path is refused unless it is known. Paths with tricks in them are
refused before they are compared.
"""

from __future__ import annotations

from enum import Enum

VERSIONED = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"})
_INFERENCE = frozenset(
    {
        "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/v1/classify",
        "/v1/pooling", "/v2/rerank", "/v2/embed",
        "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/score", "/rerank", "/pooling", "/classify",
        "/encode", "/embed", "/inference/v1/generate", "/v1/chat/completions/render", "/v1/completions/render",
    }
)  # fmt: skip
_UPLOADS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# Not among them: SGLang's /get_server_info, which shows the engine's key.
_READ = frozenset({"/v1/models", "/version", "/model_info", "/get_model_info", "/tokenizer_info", "/ping", "/load"})
_READ_BELOW = ("/v1/models/", "/v1/responses/")


class Kind(Enum):
    """How a path is treated."""

    VERSIONED = "versioned"  # admitted, constrained, stamped
    INFERENCE = "inference"  # admitted and constrained by headers, a JSON object
    UPLOAD = "upload"  # admitted and constrained by headers, passed through as it comes
    OPEN = "open"  # read-only, passed through
    BLOCKED = "blocked"


def kind(method: str, path: str, raw_path: bytes) -> Kind:
    """How a request is treated."""
    hidden = b"%2f" in raw_path.lower() or b"%5c" in raw_path.lower() or "\\" in path or "//" in path
    if hidden or any(segment in {".", ".."} for segment in path.split("/")):
        return Kind.BLOCKED
    if method == "POST" and path in VERSIONED:
        return Kind.VERSIONED
    if method == "POST" and path in _INFERENCE:
        return Kind.INFERENCE
    if method == "POST" and path in _UPLOADS:
        return Kind.UPLOAD
    readable = path in _READ or path.startswith(_READ_BELOW)
    asked = method == "OPTIONS" and path in VERSIONED | _INFERENCE | _UPLOADS  # browsers ask first
    return Kind.OPEN if asked or (readable and method in {"GET", "HEAD", "OPTIONS"}) else Kind.BLOCKED
