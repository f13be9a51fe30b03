"""Which request parameters exist, and what happens to each.

A parameter is *honoured* (a field of a request schema), *accepted* (it changes nothing here, so any value of the right
type will do), or *refused by name* unless its value asks for nothing. Whatever else a client sends is unknown: 400.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.openai.json_body import json_type, shown


@dataclass(frozen=True, slots=True)
class Rule:
    """What values a parameter that the engine never sees may have.

    Attributes:
        allows: True for a value that asks for nothing special. Null is always allowed and never gets here.
        expected: the allowed values, in words.
    """

    allows: Callable[[Any], bool]
    expected: str


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _is_string_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


_NOTHING = Rule(lambda value: False, "null or absent")
_EMPTY_LIST = Rule(_one_of([]), "absent or an empty array")
_ANY_STRING = Rule(lambda value: isinstance(value, str), "a string")

ACCEPTED: Mapping[str, Rule] = {
    "metadata": Rule(_is_string_map, "an object of strings"),
    "parallel_tool_calls": Rule(lambda value: isinstance(value, bool), "a boolean"),
    "prompt_cache_key": _ANY_STRING,
    "safety_identifier": _ANY_STRING,
    "user": _ANY_STRING,
}
"""Documented parameters without any effect on tokens."""

REFUSED_UNLESS: Mapping[str, Rule] = {
    "audio": _NOTHING,
    "function_call": Rule(_one_of("none", "auto"), '"none" or "auto"'),
    "functions": _EMPTY_LIST,
    "modalities": Rule(_one_of(["text"]), '["text"]'),
    "moderation": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_options": Rule(
        lambda value: isinstance(value, dict) and value.keys() <= {"mode"} and value.get("mode") in (None, "implicit"),
        '{"mode": "implicit"}; the prefix cache works by itself and has no time to live',
    ),
    "prompt_cache_retention": Rule(_one_of("in_memory"), '"in_memory"'),
    "reasoning_effort": Rule(_one_of("none"), '"none"; for a reasoning model use chat_template_kwargs'),
    "response_format": Rule(_one_of({"type": "text"}), '{"type": "text"}'),
    "store": Rule(_one_of(False), "false; nothing is stored here"),
    "suffix": Rule(_one_of(""), "empty; insertion is not supported"),
    "tool_choice": Rule(_one_of("none", "auto"), '"none" or "auto"'),
    "tools": _EMPTY_LIST,
    "verbosity": Rule(_one_of("medium"), '"medium"; say in the prompt how long the answer should be'),
    "web_search_options": _NOTHING,
}
"""Documented parameters that ask for what is not supported, unless the value is neutral."""

# Ignored parameters of each endpoint; together with the schema's fields they are all that OpenAI documents.
CHAT_IGNORED = frozenset(ACCEPTED) | (frozenset(REFUSED_UNLESS) - {"suffix"})
# OpenAI documents only `user` and `suffix` here; the rest is sent by clients that share one set of parameters.
COMPLETION_IGNORED = frozenset({"user", "suffix", "metadata", "store", "prompt_cache_key", "safety_identifier"})

MISNOMERS = {
    "slo_class": "an SLO class is chosen by 'service_tier', by the header X-Baton-SLO-Class or by the API key.",
}
"""Names that look like others than those that are meant."""


def check_known(names: Iterable[str], known: Iterable[str], what: str = "parameter") -> None:
    """Raises :class:`InvalidRequestError` on the first of ``names`` that is not ``known``, with the nearest that is."""
    known = sorted(known)
    for name in names:
        if name in known:
            continue
        name = name[:60]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(known)}."
        hint = MISNOMERS.get(name, hint)
        raise InvalidRequestError(f"Unknown {what} {name!r}; {hint}", param=name)


def check_ignored(values: Mapping[str, Any]) -> None:
    """Checks the parameters that the engine never sees. Those that are not in the tables are left alone.

    Raises:
        UnsupportedParameterError: a value asks for something that is not supported.
        InvalidRequestError: an accepted parameter has the wrong type.
    """
    for name, value in values.items():
        if (rule := ACCEPTED.get(name)) and not rule.allows(value):
            raise InvalidRequestError(f"{name} must be {rule.expected}, got {json_type(value)}.", param=name)
        if (rule := REFUSED_UNLESS.get(name)) and not rule.allows(value):
            raise UnsupportedParameterError(
                f"{name} is not supported with the value {shown(value)}; it must be {rule.expected}.", param=name
            )
