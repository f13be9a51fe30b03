"""Keeps web pages from using an endpoint without API keys through their visitor's browser.

A page of any site can send requests to ``http://127.0.0.1:8000``. Its browser then adds the header ``Origin``, which
the page cannot change. With DNS rebinding, a name of the page's own site leads to this machine, so that the browser
sees no foreign origin; ``Host`` has that name then.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from baton.core.errors import UntrustedOriginError

_HOST_AND_PORT = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(.+)")


def host_of(text: str) -> str | None:
    """The host in ``host[:port]``, in one spelling: lower case, no final dot, IPv6 without brackets; ``None`` if the
    text has another form."""
    match = _HOST_AND_PORT.fullmatch(text.strip().lower())
    if match is None:
        return None
    name = match[1].strip("[]")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.removesuffix(".") or None if not match[1].startswith("[") else None


def is_origin(text: str) -> bool:
    """Whether the text is an origin as browsers send it: scheme, host and perhaps a port."""
    match = _ORIGIN.fullmatch(text.lower())
    return match is not None and host_of(match[1]) is not None


def is_loopback_host(host: str) -> bool:
    """Whether a host, spelled as :func:`host_of` does, always means the machine of the client."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class OriginPolicy:
    """Decides about the headers ``Host`` and ``Origin`` while the endpoint needs no API key.

    Args:
        listens_on: ``router.host``. On loopback, ``Host`` must name an allowed host.
        allowed_hosts: hosts that are allowed besides loopback and ``listens_on``. If there are any, ``Host`` must name
            an allowed host wherever the router listens.
        cors_origins: origins whose pages are allowed, too.
    """

    def __init__(self, listens_on: str, allowed_hosts: Iterable[str] = (), cors_origins: Iterable[str] = ()) -> None:
        own = host_of(f"[{listens_on}]" if ":" in listens_on else listens_on)
        allowed = [host_of(name) for name in allowed_hosts]
        self._pages = frozenset(cors_origins)
        self._allowed = frozenset(filter(None, [own, *allowed]))
        self._checks_hosts = bool(allowed) or (own is not None and is_loopback_host(own))

    def check(self, hosts: list[str], origins: list[str]) -> None:
        """Checks the values of the two headers.

        A request without ``Host`` is accepted, since browsers always send it.

        Raises:
            UntrustedOriginError: a value is not allowed, or there are several.
        """
        host = self._check_host(hosts) if hosts else None
        if origins and not self._is_allowed_origin(origins, host):
            raise UntrustedOriginError(
                f"Web pages of {_shown(origins)} may not use this endpoint, which needs no API key. Add the page's "
                "origin to router.cors_origins."
            )

    def _check_host(self, hosts: list[str]) -> str | None:
        host = host_of(hosts[0]) if len(hosts) == 1 else None
        if self._checks_hosts and (host is None or not self._allows(host)):
            raise UntrustedOriginError(
                f"The header Host is {_shown(hosts)}, and this endpoint, which needs no API key, answers under the "
                "names of its machine only. Use http://127.0.0.1, add the name to router.allowed_hosts, or set "
                "router.api_keys."
            )
        return host

    def _is_allowed_origin(self, origins: list[str], host: str | None) -> bool:
        if len(origins) == 1 and origins[0].strip().lower() in self._pages:
            return True
        match = _ORIGIN.fullmatch(origins[0].strip().lower()) if len(origins) == 1 else None
        origin = None if match is None else host_of(match[1])
        return origin is not None and (self._allows(origin) or origin == host)

    def _allows(self, host: str) -> bool:
        return host in self._allowed or is_loopback_host(host)


def _shown(values: list[str]) -> str:
    return " and ".join(repr(value[:80]) for value in values[:2])
