"""The OpenAPI document: what drf-spectacular reads off the views, and by hand what is answered outside of DRF.

`api.schema_views` writes and serves it. A new call that is answered outside of DRF must be described here.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiResponse

from controlplane.api import answers
from controlplane.api.problems import CONTENT_TYPE

Json = dict[str, Any]

PROJECT = "/api/v1/projects/{project}"
RUN = f"{PROJECT}/runs/{{run}}"
_HEX64 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_SLUG = {"type": "string", "pattern": "^[-a-zA-Z0-9_]+$"}
_WHOLE = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
_BYTES = {"type": "string", "format": "binary"}


class Bearer(OpenApiAuthenticationExtension):
    """`Authorization: Bearer mb_...`."""

    target_class = "controlplane.api.authentication.BearerAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> Json:  # noqa: ARG002  the signature is the library's
        """As OpenAPI has it."""
        return {"type": "http", "scheme": "bearer", "bearerFormat": "mb_..."}


class Person(OpenApiAuthenticationExtension):
    """The session of a person."""

    target_class = "controlplane.api.authentication.PersonAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Json:  # noqa: ARG002
        """As OpenAPI has it."""
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}


class ProblemSchema(AutoSchema):
    """Every call may be refused with a problem document, and no view has to say so."""

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        responses = super()._get_response_bodies(direction)
        refusal = OpenApiResponse(answers.Problem, "A refusal: docs/api/problems.md.")
        responses["default"] = self._get_response_for_code(refusal, "default", [CONTENT_TYPE], direction)
        return responses


def add_plain_views(result: Json, **_: Any) -> Json:
    """drf-spectacular's hook: adds the calls that DRF does not answer."""
    for path, methods in _plain().items():
        for method, operation in methods.items():
            result["paths"].setdefault(path, {})[method] = operation
    for methods in result["paths"].values():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in _PARTS:
                    parameter["schema"] = _PARTS[parameter["name"]]
    result["paths"] = dict(sorted(result["paths"].items()))
    _close_bodies(result)
    return result


def _close_bodies(result: Json) -> None:
    """A key that nobody knows is refused (`api.shapes.Body`): the document says so too."""
    shapes, open_ones = result["components"]["schemas"], []
    for methods in result["paths"].values():
        for operation in methods.values():
            open_ones += _named(operation.get("requestBody", {}).get("content", {}).get("application/json", {}))
    while open_ones:
        shape = shapes[open_ones.pop()]
        if shape.get("type") == "object" and "additionalProperties" not in shape:
            shape["additionalProperties"] = False
            open_ones += _named(shape)


def _named(said: Any) -> list[str]:
    """The shapes that a part of the document refers to."""
    if isinstance(said, list):
        return [name for item in said for name in _named(item)]
    if not isinstance(said, dict):
        return []
    here = [said["$ref"].rpartition("/")[2]] if isinstance(said.get("$ref"), str) else []
    return here + [name for item in said.values() for name in _named(item)]


def _plain() -> dict[str, dict[str, Json]]:
    blob, tensors = f"{RUN}/blobs/{{sha256}}", f"{RUN}/versions/{{number}}/tensors"
    head, upload = f"{RUN}/channels/{{channel}}/head", f"{RUN}/blobs/uploads/{{upload}}"
    ranges = [_header("Range", {"type": "string"}), _header("If-Range", {"type": "string"})]
    direct = _query("direct", {"type": "string", "enum": ["0", "1"]}, "1: a redirect to the blob store, if it has one.")
    changed = _header("If-None-Match", {"type": "string"})
    wait = [
        _query("after", _WHOLE, "The serial that is known: wait for a higher one."),
        _query("wait", {"type": "integer", "minimum": 0, "maximum": 60}, "Seconds to wait at most."),
    ]
    offset = _header("Upload-Offset", {"type": "integer", "minimum": 0}, "Where the body begins.", required=True)
    stands = {"Upload-Offset": {"schema": _WHOLE, "description": "How many bytes have arrived."}}
    downloads = {
        "200": _content("All bytes.", "application/octet-stream", _BYTES),
        "206": _content("The bytes of the range.", "application/octet-stream", _BYTES),
        "304": _empty("It is what `If-None-Match` names."),
        "307": _empty("Fetch it from the address in `Location`, without your token."),
        "416": _empty("The range lies behind the end."),
    }
    envelope = {"$ref": "#/components/schemas/Envelope"}
    heads = {
        "200": _content("The head: a DSSE envelope.", "application/json", envelope),
        "204": _empty("There is no head yet."),
        "304": _empty("It is what `If-None-Match` names."),
    }
    fed = {"204": _empty("How much has arrived.", headers=stands)}
    kind = "application/vnd.mailboat.statistics"
    columns = {code: _content(text["description"], kind, _BYTES) for code, text in downloads.items() if code[0] == "2"}
    columns |= {code: downloads[code] for code in ("304", "416")}
    health = {code: _content(text, "application/json", {"type": "object"}) for code, text in _HEALTH.items()}
    return {
        blob: _reads("blob", "The bytes of a blob, or one range of them.", [direct, *ranges, changed], downloads, blob),
        tensors: {
            "get": _operation(
                "tensors", "Changes per tensor: docs/format/statistics.md.", [*ranges, changed], columns, tensors
            )
        },
        head: {"get": _operation("head", "Where a channel stands. A long poll.", [*wait, changed], heads, head)},
        upload: {
            "patch": _operation("upload_append", "Adds bytes to an upload.", [offset], fed, upload)
            | {"requestBody": {"content": {"application/octet-stream": {"schema": _BYTES}}, "required": True}},
            "head": _operation("upload_offset", "How many bytes have arrived.", [], fed, upload),
        },
        "/health/live": {"get": _operation("live", "Whether the process lives.", [], {"200": health["200"]}, "")},
        "/health/ready": {"get": _operation("ready", "Whether it can do its work.", [], health, "")},
    }


_HEALTH = {"200": "It is well.", "503": "Something is missing; the body names it."}
_PARTS = {
    "project": _SLUG,
    "run": _SLUG,
    "channel": _SLUG,
    "sha256": _HEX64,
    "number": _WHOLE,
    "upload": {"type": "string", "format": "uuid"},
}


def _operation(name: str, text: str, parameters: list[Json], responses: Json, path: str) -> Json:
    address = [
        {"in": "path", "name": part, "schema": schema, "required": True}
        for part, schema in _PARTS.items()
        if f"{{{part}}}" in path
    ]
    return {
        "operationId": name,
        "description": text,
        "parameters": [*address, *parameters],
        "tags": ["v1" if path else "health"],
        "security": [{"token": []}, {"session": []}] if path else [{}],
        "responses": responses | {"default": _problem()},
    }


def _reads(name: str, text: str, parameters: list[Json], responses: Json, path: str) -> dict[str, Json]:
    """GET, and HEAD with the same answers without their bodies."""
    bare = {code: {key: value for key, value in said.items() if key != "content"} for code, said in responses.items()}
    head = _operation(f"{name}_head", text, parameters, bare, path)
    head["responses"]["default"] = {"description": "A refusal."}
    return {"get": _operation(name, text, parameters, responses, path), "head": head}


def _header(name: str, schema: Json, text: str = "", *, required: bool = False) -> Json:
    return {"in": "header", "name": name, "schema": schema, "description": text, "required": required}


def _query(name: str, schema: Json, text: str) -> Json:
    return {"in": "query", "name": name, "schema": schema, "description": text}


def _content(text: str, media_type: str, schema: Json) -> Json:
    return {"description": text, "content": {media_type: {"schema": schema}}}


def _empty(text: str, headers: Json | None = None) -> Json:
    return {"description": text} | ({"headers": headers} if headers else {})


def _problem() -> Json:
    return {
        "description": "A refusal.",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
