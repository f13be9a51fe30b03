"""Building blocks of configuration sections and command options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")
_MAX_DURATION_S = 86_400.0
_MAX_NICENESS = 19
_NOTHING = ("null", "none", "nil", "~", "off", "no", "false")


class Section(BaseModel):
    """Base of all configuration sections: no unknown keys, no coercion of types, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a traceback must not quote API keys; `config_reading.explain` writes the message
    )


@dataclass(frozen=True, slots=True)
class CommandOption:
    """Annotates a field whose command-line option differs from the field's name.

    Attributes:
        names: such as ``("-o", "--out")``, or ``("--on/--off",)`` for a flag; empty means the field's name with dashes.
        metavar: placeholder for the value in help.
    """

    names: tuple[str, ...] = ()
    metavar: str | None = None


def option_name(section: type[BaseModel], field: str) -> str:
    """The command-line name of a field, with dashes: ``max_tokens`` → ``--max-tokens``."""
    for annotation in section.model_fields[field].metadata:
        if isinstance(annotation, CommandOption) and annotation.names:
            return annotation.names[-1].partition("/")[0]
    return f"--{field.replace('_', '-')}"


def seconds_of(text: str) -> float | None:
    """``500ms``, ``2s``, ``10min`` or ``1h`` in seconds; a bare number is in seconds; ``None`` for any other text."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        return None
    return float(match[1]) * _UNITS_S[match[2]]


def parse_duration_s(value: object) -> float:
    """Parses a duration of the configuration: text as in :func:`seconds_of`, or a number of seconds.

    Raises:
        ValueError: it is neither, or longer than a day.
    """
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = seconds_of(value)
    if seconds is None or not 0 <= seconds <= _MAX_DURATION_S:
        raise ValueError(
            f"{str(value)[:40]!r} is not a duration of at most a day; expected one such as 500ms, 2s or 10min"
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Returns text that :func:`parse_duration_s` reads as exactly ``seconds``."""
    in_ms = f"{seconds * 1e3:.10g}ms"
    return in_ms if seconds < 1 and parse_duration_s(in_ms) == seconds else f"{seconds:.17g}s"


def _at_least(shortest_s: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        seconds = parse_duration_s(value)
        if seconds < shortest_s:
            raise ValueError(f"{str(value)[:40]!r} is too short; the minimum is {format_duration(shortest_s)}")
        return seconds

    return parse


def _draft_reference(value: object) -> object:
    """Refuses words for "nothing", which would be taken for folders."""
    if value is None or value is False or (isinstance(value, str) and value.lower() in _NOTHING and value != "none"):
        shown = "null" if value is None else str(value).lower() if value is False else value
        raise ValueError(
            f"{shown} is not a draft; expected none to disable drafts, auto for the draft of the default model, a "
            "folder or a hub id"
        )
    return value


def _niceness(value: object) -> object:
    """Checks the value here, since a union would report one error for each of its types."""
    if value != "auto" and not (type(value) is int and 0 <= value <= _MAX_NICENESS):
        shown = "null" if value is None else str(value)[:40]
        raise ValueError(f"{shown} is neither auto nor a whole number from 0 to {_MAX_NICENESS}")
    return value


PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
NonEmptyString = Annotated[str, Field(min_length=1)]
DraftReference = Annotated[NonEmptyString, BeforeValidator(_draft_reference)]
Niceness = Annotated[int | Literal["auto"], BeforeValidator(_niceness)]
_AsText = PlainSerializer(format_duration, return_type=str, when_used="json")
Duration = Annotated[float, BeforeValidator(_at_least(1e-3)), _AsText]
"""Seconds, written with a unit; at least a millisecond."""
AnswerDuration = Annotated[float, BeforeValidator(_at_least(0.05)), _AsText]
"""Like :data:`Duration`, but at least 50 ms, which processes that are well may take to answer."""
DurationOrZero = Annotated[float, BeforeValidator(_at_least(0.0)), _AsText]
