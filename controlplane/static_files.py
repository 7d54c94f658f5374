"""Static files for an application whose views wait: WhiteNoise's middleware alone is synchronous, and one synchronous
middleware gives every waiting request a thread of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware


class StaticFiles(WhiteNoiseMiddleware):
    """WhiteNoise for both kinds of views. The files are small: under ASGI they are sent from memory."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        super().__init__(get_response)
        self.asynchronous = iscoroutinefunction(get_response)
        if self.asynchronous:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Answers a request for a static file, and passes on every other one."""
        return self._answer(request) if self.asynchronous else super().__call__(request)

    async def _answer(self, request: HttpRequest) -> HttpResponseBase:
        response = (
            await sync_to_async(self._file)(request) if request.path_info.startswith(self.static_prefix) else None
        )
        return await self.get_response(request) if response is None else response

    def _file(self, request: HttpRequest) -> HttpResponse | None:
        found = self.find_file(request.path_info) if self.autorefresh else self.files.get(request.path_info)
        if found is None:
            return None
        with closing(self.serve(found, request)) as streamed:
            response = HttpResponse(b"".join(streamed.streaming_content), status=streamed.status_code)
            response.headers = streamed.headers
        return response
