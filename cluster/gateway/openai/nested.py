"""Checks of what a parameter nests: objects, arrays and strings at a path such as ``input[2].content``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.openai.json_body import json_type, shown, without_nulls
from cluster.gateway.openai.known_names import check_known

_MAX_ENTRIES = 8192
"""Highest number of messages and content parts, as in chats: each costs time."""
_NESTED = ("content", "output", "summary")
"""Keys of the arrays that messages and parts hold."""


def wrong(path: str, problem: str) -> InvalidRequestError:
    """The error for what is at ``path``, with which its text begins."""
    return InvalidRequestError(f"{path} {problem}", param=path)


def unsupported(path: str, problem: str) -> UnsupportedParameterError:
    """Like :func:`wrong`, for what is valid and not supported."""
    return UnsupportedParameterError(f"{path} {problem}", param=path)


def check_size(value: Any, path: str) -> None:
    """Raises :class:`InvalidRequestError` if there are too many messages and parts. To be called first."""
    count, rest = 0, [value]
    while rest:
        found = rest.pop()
        if isinstance(found, list):
            count += len(found)
            if count > _MAX_ENTRIES:
                raise wrong(path, f"has more than {_MAX_ENTRIES} entries and content parts. Send fewer.")
            rest += found
        elif isinstance(found, dict):
            rest += (found[key] for key in _NESTED if key in found)


def object_at(value: Any, path: str) -> dict[str, Any]:
    """``value`` without nulls. Raises :class:`InvalidRequestError` if it is no object."""
    if not isinstance(value, dict):
        raise wrong(path, f"must be an object, got {json_type(value)}.")
    return without_nulls(value)


def checked_object(value: Any, path: str, known: Iterable[str]) -> dict[str, Any]:
    """``value`` without nulls.

    Raises:
        InvalidRequestError: it is no object, or has another key that is not ``known``.
    """
    given = object_at(value, path)
    check_known(given, known, path=path)
    return given


def checked_list(value: Any, path: str, expected: str = "an array") -> list[Any]:
    """Raises :class:`InvalidRequestError`, which says what is ``expected``, if ``value`` is no array."""
    if not isinstance(value, list):
        raise wrong(path, f"must be {expected}, got {json_type(value)}.")
    return value


def checked_string(value: Any, path: str) -> str:
    """Raises :class:`InvalidRequestError` if ``value`` is no string."""
    if not isinstance(value, str):
        raise wrong(path, f"must be a string, got {shown(value)}.")
    return value


def checked_word(value: Any, path: str) -> str:
    """Raises :class:`InvalidRequestError` if ``value`` is no string, or an empty one."""
    if not isinstance(value, str) or not value:
        raise wrong(path, "must be a string that is not empty.")
    return value


def checked_choice(value: Any, path: str, choices: Iterable[str]) -> str:
    """Raises :class:`InvalidRequestError` if ``value`` is none of ``choices``."""
    choices = list(choices)
    if value not in choices:
        raise wrong(path, f"must be one of {', '.join(choices)}, got {shown(value)}.")
    return str(value)


def check_neutral(value: Mapping[str, Any], path: str, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Checks keys of which only the values that change nothing are allowed.

    Raises:
        UnsupportedParameterError: another value; the message names its key.
    """
    for key, allowed in neutral.items():
        if key in value and not any(type(value[key]) is type(known) and value[key] == known for known in allowed):
            raise unsupported(f"{path}.{key}", f"is not supported with the value {shown(value[key])}; leave it out.")


def unsupported_type(path: str, kind: Any, supported: Iterable[str]) -> UnsupportedParameterError:
    """The error for an object at ``path`` whose ``type`` is none of ``supported``."""
    return unsupported(f"{path}.type", f"{shown(kind)} is not supported; it must be {' or '.join(supported)}.")
