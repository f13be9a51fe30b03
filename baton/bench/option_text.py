"""Options that hold several values in one text: ``kind:key=value,...``, durations, names that must be known."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from baton.core.config_section import seconds_of
from baton.core.errors import ConfigError


def known_name(option: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is among ``known``.

    Raises:
        ConfigError: it is not; the message names ``option``, everything known and what is nearest.
    """
    names = list(known)
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{option}: {name!r} is not known. Expected one of {', '.join(names)}.{hint}")


def key_values(option: str, text: str, known: Iterable[str]) -> dict[str, str]:
    """``"a=1,b=2"`` → ``{"a": "1", "b": "2"}``; keys are checked by :func:`known_name`.

    Raises:
        ConfigError: a part is not ``key=value``, or a key is unknown or given twice.
    """
    names = list(known)
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or not value:
            raise ConfigError(f"{option}: {part!r} is not KEY=VALUE. Expected keys among {', '.join(names)}.")
        if known_name(option, key, names) in values:
            raise ConfigError(f"{option}: {key} is given twice. Give it once.")
        values[key] = value
    return values


def positive_number(option: str, text: str) -> float:
    """A finite number over 0. Raises :class:`ConfigError` for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option}: {text!r} is not a number over 0.")
    return value


def check_over_zero(option: str, value: float, at_most: float | None = None) -> None:
    """Raises :class:`ConfigError` unless ``value`` is a finite number over 0, and not over ``at_most``."""
    if not (math.isfinite(value) and value > 0) or (at_most is not None and value > at_most):
        end = "" if at_most is None else f" and at most {at_most:g}"
        raise ConfigError(f"{option} must be a number over 0{end}; got {value:g}.")


def check_not_negative(option: str, value: float) -> None:
    """Raises :class:`ConfigError` unless ``value`` is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} must be a number of at least 0; got {value:g}.")


def positive_integer(option: str, text: str) -> int:
    """A whole number over 0. Raises :class:`ConfigError` for anything else."""
    value = positive_number(option, text)
    if not value.is_integer():
        raise ConfigError(f"{option}: {text!r} is not a whole number over 0.")
    return int(value)


def duration_s(option: str, text: str) -> float:
    """``"500ms"``, ``"2s"``, ``"10min"`` → seconds; a bare number is in seconds.

    Raises:
        ConfigError: not a duration over 0.
    """
    seconds = seconds_of(text)
    if not seconds:
        raise ConfigError(f"{option}: {text!r} is not a duration over 0. Expected one such as 500ms, 2s or 10min.")
    return seconds
