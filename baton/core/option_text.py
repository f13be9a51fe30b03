"""Options that hold several values in one text: lists, ``kind:key=value,...``, durations, known names, addresses."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from baton.core.config_section import seconds_of
from baton.core.errors import ConfigError


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` → ``("a", "b")``, without duplicates; empty text gives no names."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def names_if_given(option: str, text: str | None) -> tuple[str, ...]:
    """Like :func:`names`; ``None`` gives no names.

    Raises:
        ConfigError: the option was given without a name.
    """
    found = names(text or "")
    if text is not None and not found:
        raise ConfigError(f"{option} is empty. Give names separated by commas, or leave the option out to select all.")
    return found


def integers(option: str, text: str) -> tuple[int, ...]:
    """``"1,4"`` → ``(1, 4)``. Raises :class:`ConfigError`, which names ``option``, for anything else."""
    try:
        return tuple(int(part) for part in names(text))
    except ValueError as error:
        raise ConfigError(
            f"{option} must be whole numbers separated by commas, such as 1,4,16; got {text!r}."
        ) from error


def numbers(option: str, text: str) -> tuple[float, ...]:
    """``"0,0.8"`` → ``(0.0, 0.8)``. Raises :class:`ConfigError`, which names ``option``, for anything else."""
    try:
        found = tuple(float(part) for part in names(text))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{option} must be numbers separated by commas, such as 0,0.8; got {text!r}.")
    return found


def known_name(option: str, name: str, known: Iterable[str]) -> str:
    """Returns ``name`` if it is among ``known``.

    Raises:
        ConfigError: it is not; the message names ``option``, all known names and the nearest one.
    """
    expected = list(known)
    if name in expected:
        return name
    close = difflib.get_close_matches(name, expected, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{option}: {name!r} is unknown. Expected one of {', '.join(expected)}.{hint}")


def key_values(option: str, text: str, known: Iterable[str]) -> dict[str, str]:
    """``"a=1,b=2"`` → ``{"a": "1", "b": "2"}``; keys are checked by :func:`known_name`.

    Raises:
        ConfigError: a part is not ``key=value``, or a key is unknown or given twice.
    """
    keys = list(known)
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or not value:
            raise ConfigError(f"{option}: {part!r} is not KEY=VALUE. Expected keys among {', '.join(keys)}.")
        if known_name(option, key, keys) in values:
            raise ConfigError(f"{option}: {key} is given twice; give it once.")
        values[key] = value
    return values


def positive_number(option: str, text: str) -> float:
    """Parses a finite number over 0. Raises :class:`ConfigError` for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option}: {text!r} is not a number above 0.")
    return value


def check_positive(option: str, value: float, at_most: float | None = None) -> None:
    """Raises :class:`ConfigError` unless ``value`` is a finite number over 0 and at most ``at_most``."""
    if not (math.isfinite(value) and value > 0) or (at_most is not None and value > at_most):
        end = "" if at_most is None else f" and at most {at_most:g}"
        raise ConfigError(f"{option} must be a number above 0{end}; got {value:g}.")


def check_not_negative(option: str, value: float) -> None:
    """Raises :class:`ConfigError` unless ``value`` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} must be a number of at least 0; got {value:g}.")


def positive_integer(option: str, text: str) -> int:
    """Parses a whole number over 0. Raises :class:`ConfigError` for anything else."""
    value = positive_number(option, text)
    if not value.is_integer():
        raise ConfigError(f"{option}: {text!r} is not a whole number above 0.")
    return int(value)


def duration_s(option: str, text: str) -> float:
    """``"500ms"``, ``"2s"``, ``"10min"`` → seconds; a bare number is in seconds.

    Raises:
        ConfigError: not a duration over 0.
    """
    seconds = seconds_of(text)
    if not seconds:
        raise ConfigError(f"{option}: {text!r} is not a duration above 0. Expected one such as 500ms, 2s or 10min.")
    return seconds


def is_host_and_port(text: str) -> bool:
    """Whether it has the form ``HOST:PORT``, with a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    is_host = bool(host) and not any(char.isspace() or char == "/" for char in host)
    return is_host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16
