"""Accepts other spellings of a request: HEAD wherever there is GET, and a slash after the path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class LenientRoutes:
    """Middleware that passes such requests on in the spelling of the routes. The server sends no body after HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        inner = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]  # for metrics and the access log
