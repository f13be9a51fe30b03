"""The header in which Anthropic's clients name the version of the API."""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.errors import UnsupportedParameterError

VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")


def check_version(headers: Mapping[str, str]) -> None:
    """Both versions have the same answers, and the header may be absent.

    Raises:
        UnsupportedParameterError: another version.
    """
    version = headers.get(VERSION_HEADER)
    if version is not None and version not in _VERSIONS:
        raise UnsupportedParameterError(
            f"{VERSION_HEADER} {version[:60]!r} is not supported; it must be {' or '.join(_VERSIONS)}.",
            param=VERSION_HEADER,
        )
