"""The header in which Anthropic's clients name the version of the API."""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.errors import UnsupportedParameterError

VERSION_HEADER = "anthropic-version"
_VERSION = "2023-06-01"


def check_version(headers: Mapping[str, str]) -> None:
    """A request without the header is one of the only version.

    Raises:
        UnsupportedParameterError: another version.
    """
    version = headers.get(VERSION_HEADER, _VERSION)
    if version != _VERSION:
        raise UnsupportedParameterError(
            f"{VERSION_HEADER} {version[:60]!r} is not supported; it must be {_VERSION}.", param=VERSION_HEADER
        )
