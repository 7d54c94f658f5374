"""The OpenAPI document and a page to read it.

The document is committed as docs/api/openapi.yaml; `manage.py openapi` writes it and a test compares. It describes
every call, so a change of it is a change of the interface.
"""

from __future__ import annotations

from functools import lru_cache

from django.http import HttpRequest, HttpResponse
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiYamlRenderer
from drf_spectacular.views import SpectacularSwaggerSplitView


@lru_cache(maxsize=1)
def document() -> bytes:
    """The document as YAML."""
    found = SchemaGenerator().get_schema(request=None, public=True)
    rendered: bytes = OpenApiYamlRenderer().render(found, renderer_context={})
    return rendered


def schema(request: HttpRequest) -> HttpResponse:  # noqa: ARG001  Django hands it over
    """GET /api/schema. It holds nothing that is secret, so anybody may read it."""
    return HttpResponse(document(), content_type="application/vnd.oai.openapi; charset=utf-8")


class Docs(SpectacularSwaggerSplitView):
    """/api/docs/: Swagger UI from our own files, with neither inline scripts nor inline styles."""

    template_name = "api/docs.html"
    url_name = "api-schema"
