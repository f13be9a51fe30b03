"""The installed version of baton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The installed version; ``unknown`` for sources that were never installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
