"""Which paths of an engine the world may call, and how each is kept apart from a prefix cache of older weights.

What changes an engine is the sidecar's alone. An engine's control surface grows with each release, and some of it
answers GET as well as POST, so whatever the method a path is refused unless it is known. Paths with tricks in them are
refused before they are compared. How engines treat the keys of their prefix caches was read in their source
(docs/adr/keys-on-every-route.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KEYS = {"vllm": "cache_salt", "sglang": "extra_key"}  # the member of a request that namespaces the prefix cache
_READ = frozenset({"/v1/models", "/version", "/model_info", "/get_model_info", "/tokenizer_info", "/ping", "/load"})
# Not among them: SGLang's /get_server_info, which shows the engine's key.
_READ_BELOW = ("/v1/models/", "/v1/responses/")


class Kind(Enum):
    """How a path is treated."""

    VERSIONED = "versioned"  # admitted, constrained, stamped
    INFERENCE = "inference"  # admitted and constrained by headers, a JSON object
    UPLOAD = "upload"  # admitted and constrained by headers, passed through as it comes
    OPEN = "open"  # read-only, passed through
    BLOCKED = "blocked"


class Cache(Enum):
    """What a route has to do with an engine's prefix cache."""

    KEYED = "keyed"  # its requests carry a key, in every build
    DECLARED = "declared"  # in builds whose /openapi.json says so
    KEYLESS = "keyless"  # they carry none, or it is dropped on the way
    UNUSED = "unused"  # nothing is computed from weights


@dataclass(frozen=True, slots=True)
class Route:
    """A path that computes: how it is treated, and its prefix cache by engines that have one."""

    kind: Kind
    vllm: Cache
    sglang: Cache

    def cache(self, engine: str | None) -> Cache:
        """For one engine; ``UNUSED`` for those without a prefix cache."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(engine or "", Cache.UNUSED)


ROUTES: dict[str, Route] = {
    **dict.fromkeys(
        ("/v1/completions", "/v1/chat/completions", "/v1/responses"), Route(Kind.VERSIONED, Cache.KEYED, Cache.KEYED)
    ),
    "/generate": Route(Kind.VERSIONED, Cache.KEYLESS, Cache.KEYED),
    **dict.fromkeys(
        (
            "/v1/messages", "/inference/v1/generate", "/v1/embeddings", "/v2/embed", "/embed", "/encode", "/pooling",
            "/v1/pooling", "/classify", "/v1/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        ),
        Route(Kind.INFERENCE, Cache.DECLARED, Cache.KEYLESS),
    ),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations"), Route(Kind.UPLOAD, Cache.KEYLESS, Cache.KEYLESS)
    ),
    **dict.fromkeys(
        (
            "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens",
            "/v1/chat/completions/render", "/v1/completions/render",
        ),
        Route(Kind.INFERENCE, Cache.UNUSED, Cache.UNUSED),
    ),
}  # fmt: skip


def kind(method: str, path: str, raw_path: bytes) -> Kind:
    """How a request is treated."""
    hidden = b"%2f" in raw_path.lower() or b"%5c" in raw_path.lower() or "\\" in path or "//" in path
    if hidden or any(segment in {".", ".."} for segment in path.split("/")):
        return Kind.BLOCKED
    if method == "POST" and path in ROUTES:
        return ROUTES[path].kind
    readable = path in _READ or path.startswith(_READ_BELOW)
    asked = method == "OPTIONS" and path in ROUTES  # browsers ask first
    return Kind.OPEN if asked or (readable and method in {"GET", "HEAD", "OPTIONS"}) else Kind.BLOCKED
