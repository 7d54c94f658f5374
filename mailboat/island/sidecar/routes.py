"""Which paths of an engine the world may call.

What changes an engine is the sidecar's alone: an engine's control surface grows with each release, so unsafe methods
are refused unless the path is known to be inference. Paths with tricks in them are refused before they are compared.
"""

from __future__ import annotations

from enum import Enum

VERSIONED = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"})
_INFERENCE = frozenset(
    {
        "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/v1/classify",
        "/v1/pooling", "/v2/rerank", "/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/score", "/rerank", "/pooling", "/classify",
        "/encode", "/embed", "/inference/v1/generate", "/v1/chat/completions/render", "/v1/completions/render",
    }
)  # fmt: skip
_READ_BLOCKED = frozenset(
    {
        "/flush_cache", "/is_paused", "/is_sleeping", "/abort_requests", "/weights_checker", "/weight_checker",
        "/start_profile", "/stop_profile", "/get_weights_by_name", "/docs", "/redoc", "/openapi.json",
    }
)  # fmt: skip


class Kind(Enum):
    """How a path is treated."""

    VERSIONED = "versioned"  # admitted, constrained, stamped
    INFERENCE = "inference"  # admitted and constrained by headers, passed through
    OPEN = "open"  # read-only, passed through
    BLOCKED = "blocked"


def kind(method: str, path: str, raw_path: bytes) -> Kind:
    """How a request is treated."""
    if b"%2f" in raw_path.lower() or b"%5c" in raw_path.lower() or "\\" in path or "//" in path:
        return Kind.BLOCKED
    if any(segment in {".", ".."} for segment in path.split("/")):
        return Kind.BLOCKED
    if path in VERSIONED:
        return Kind.VERSIONED if method == "POST" else Kind.BLOCKED
    if method in {"GET", "HEAD", "OPTIONS"}:
        safe = path not in _READ_BLOCKED and not path.startswith(("/update_", "/init_", "/collective_rpc", "/pause"))
        return Kind.OPEN if safe else Kind.BLOCKED
    return Kind.INFERENCE if method == "POST" and path in _INFERENCE else Kind.BLOCKED
