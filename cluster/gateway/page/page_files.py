"""The files of the page, read once and served from memory, so that no path of a client reaches the file system."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import Request, Response

from baton.core.errors import NotFoundError

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Trusted Types make the browser refuse every script that would turn a string into HTML or code.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the ETag is asked for each time, so an upgrade shows at once
}


class PageFiles:
    """Answers requests for the files in ``static``."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._files = {entry.name: _File(entry) for entry in folder.iterdir() if _suffix(entry.name) in _TYPES}

    def names(self) -> list[str]:
        return sorted(self._files)

    def answer(self, request: Request, name: str) -> Response:
        """The file, or 304 if the client has it.

        Raises:
            NotFoundError: there is no such file.
        """
        found = self._files.get(name)
        if found is None:
            raise NotFoundError(f"The page has no file {name[:80]!r}.")
        headers = {**_HEADERS, "ETag": found.etag}
        known = (text.strip().removeprefix("W/") for text in request.headers.get("if-none-match", "").split(","))
        if found.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers={**headers, "Content-Type": found.content_type})


class _File:
    def __init__(self, source: Traversable) -> None:
        self.content = source.read_bytes()
        self.content_type = _TYPES[_suffix(source.name)]
        self.etag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
