"""Which certificates the commands accept from a router."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from baton.client.local_cluster import read_state
from baton.core.errors import ConfigError

CA_VARIABLE = "BATON_CA"
_END = "-----END CERTIFICATE-----"


def tls_context(endpoint: str, ca: Path | None = None) -> ssl.SSLContext | None:
    """How to verify the router at ``endpoint``; ``None`` leaves that to the HTTP client.

    With ``ca`` or ``$BATON_CA``, a file of certificates in PEM format, one of these must vouch for the router.
    Otherwise the cluster that ``baton up`` runs on this machine must show the very certificate in its configuration,
    whatever name it was issued for.

    Args:
        ca: the option ``--ca``; ``None`` means the variable.

    Raises:
        ConfigError: a file of certificates cannot be read.
    """
    if urlsplit(endpoint).scheme != "https":
        return None
    if ca is not None:
        return _context(_read(str(ca), "--ca"))
    if authority := os.environ.get(CA_VARIABLE):
        return _context(_read(authority, CA_VARIABLE))
    state = read_state()
    if state is None or state.certificate is None or _server(state.endpoint or "") != _server(endpoint):
        return None
    own = _read(state.certificate, "router.tls.certificate").partition(_END)
    context = _context("".join(own[:2]))
    context.check_hostname = False
    return context


def _server(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _context(certificates: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=certificates)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"The certificates of the router cannot be used ({error}). Expected certificates in PEM format."
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts the given certificates without their issuers
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # self-signed certificates often lack extensions
    return context


def _read(path: str, origin: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin}: cannot read {path} ({error}); expected certificates in PEM format.") from error
