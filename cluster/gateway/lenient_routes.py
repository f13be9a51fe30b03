"""Accepts other spellings of a request: HEAD wherever there is GET, a slash after the path, and a whole URL as target
(RFC 9112, section 3.2.2)."""

from __future__ import annotations

from urllib.parse import urlsplit

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
        path = scope["path"]
        if path.startswith(("http://", "https://")):
            path = urlsplit(path).path
        inner = {**scope, "method": method, "path": path.rstrip("/") or "/"}
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]  # for metrics and the access log
