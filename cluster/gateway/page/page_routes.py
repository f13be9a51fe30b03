"""The routes of the page. They need no API key, since the files hold no data; what the page reads with them does."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.routing import Match, Route
from starlette.types import Scope

from cluster.gateway.page.negotiation import prefers_page
from cluster.gateway.page.page_files import INDEX, PageFiles

FILES_PATH = "/page/{name}"
"""The path template of the page's files, which are not part of the API."""


class _PageRoute(Route):
    """A route that metrics and the access log know by its path template."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}


class _IndexRoute(_PageRoute):
    """Matches browsers. Other clients get the next route with this path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not prefers_page(Headers(scope=scope).get("accept", "")):
            return Match.NONE, {}
        return super().matches(scope)


def add_page(app: FastAPI) -> None:
    """Serves the page at ``/``. Must be called before another route with this path is added."""
    page_files = PageFiles()

    async def index(request: Request) -> Response:
        response = page_files.answer(request, INDEX)
        response.headers["Vary"] = "Accept"
        return response

    async def file(request: Request) -> Response:
        return page_files.answer(request, request.path_params["name"])

    app.router.routes += [
        _IndexRoute("/", index, methods=["GET"]),
        _PageRoute(FILES_PATH, file, methods=["GET"]),
    ]
