"""Who may use which endpoint: bearer keys, where the configuration has any."""

from __future__ import annotations

from fastapi import Request

from baton.core.errors import BatonError, PermissionDeniedError
from cluster.gateway.api_keys import ApiKey, ApiKeys
from cluster.gateway.http_edge import add_log_fields, drop_body

_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
"""What load balancers and Prometheus ask; nothing in it belongs to anybody."""
_ADMIN_PREFIX = "/admin/"
_OPERATORS_PATHS = frozenset({"/v1/requests"})
"""What tells of everybody's requests."""
_STATE_KEY = "api_key"


def api_key_of(request: Request) -> ApiKey | None:
    """The key that the request came with; None where none is asked for."""
    api_key: ApiKey | None = request.scope["state"].get(_STATE_KEY)
    return api_key


class AccessControl:
    """Asks for keys; a dependency of the application."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def check(self, request: Request) -> None:
        """Remembers whose request it is.

        Raises:
            InvalidApiKeyError: there is no key, or an unknown one.
            PermissionDeniedError: the key is no operator's.
        """
        if request.scope["path"] in _OPEN_PATHS:
            return
        try:
            self._identify(request)
        except BatonError:
            await drop_body(request)
            raise

    def _identify(self, request: Request) -> None:
        api_key = self._keys.find(request.headers.get("authorization"))
        request.scope["state"][_STATE_KEY] = api_key
        add_log_fields(request, api_key=api_key.name)
        path = request.scope["path"]
        if (path.startswith(_ADMIN_PREFIX) or path in _OPERATORS_PATHS) and not api_key.is_admin:
            raise PermissionDeniedError(
                f"The API key {api_key.name!r} may not use {path[:80]}. Use one that has `admin: true`."
            )
