"""Rules for request parameters: which the gateway honours, accepts without effect, or refuses by name.

:mod:`cluster.gateway.openai.parameter_table` has a row for every parameter of OpenAI, vLLM and SGLang. The parser
follows the table, and docs/parameters.md and ``/openapi.json`` are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.gateway.openai.json_body import whole

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Origin = Literal["OpenAI", "Anthropic", "vLLM", "SGLang", "baton"]
Kind = Literal["string", "boolean", "integer", "number", "object"]

_TYPES: Mapping[Kind, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "object": (dict,),
}  # fmt: skip
_ARTICLES = {"integer": "an", "object": "an"}


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of a parameter that the engine never sees. Null is always allowed and means absent.

    Attributes:
        values: the allowed values.
        kind: allows every value of this JSON type instead.
        expected: the allowed values, in words; empty to name them.
    """

    values: tuple[object, ...] = ()
    kind: Kind | None = None
    expected: str = ""

    def allows(self, value: object) -> bool:
        # type() and not isinstance(), since a bool is an int.
        value = whole(value)
        if self.kind is not None:
            return type(value) in _TYPES[self.kind]
        return any(type(value) is type(known) and value == known for known in self.values)

    def describe(self) -> str:
        """The allowed values, in words."""
        if self.expected:
            return self.expected
        if self.kind is not None:
            return f"{_ARTICLES.get(self.kind, 'a')} {self.kind}"
        return " or ".join(map(json.dumps, self.values)) or "null or absent"

    def schema(self) -> dict[str, Any]:
        """The allowed values as a JSON schema."""
        return {"type": [self.kind, "null"]} if self.kind else {"enum": [*self.values, None]}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of the table.

    Attributes:
        origin: the first of the APIs that document it.
        note: its meaning here, or why it is not honoured and what to send instead.
        rule: the allowed values; ``None`` if it is honoured, so that a field of a request schema has its type.
        has_effect: whether values beyond the rule would change the answer, and are refused for that.
        endpoints: the endpoints that know it.
        max_items: highest number of entries of an array or object.
    """

    name: str
    origin: Origin
    note: str
    rule: Rule | None = None
    has_effect: bool = True
    endpoints: tuple[str, ...] = (CHAT, COMPLETIONS)
    max_items: int | None = None

    @property
    def treatment(self) -> Literal["honoured", "accepted", "refused"]:
        if self.rule is None:
            return "honoured"
        return "refused" if self.has_effect else "accepted"


def honoured(
    name: str, origin: Origin, note: str, endpoints: tuple[str, ...] = (CHAT, COMPLETIONS), max_items: int | None = None
) -> Parameter:
    """A parameter that is a field of a request schema."""
    return Parameter(name, origin, note, endpoints=endpoints, max_items=max_items)


def accepted(
    name: str,
    origin: Origin,
    kind: Kind,
    note: str,
    endpoints: tuple[str, ...] = (CHAT, COMPLETIONS),
    max_items: int | None = None,
) -> Parameter:
    """A parameter that has no effect, so that any value of its type is allowed."""
    return Parameter(name, origin, note, Rule(kind=kind), has_effect=False, endpoints=endpoints, max_items=max_items)


def refused(
    name: str,
    origin: Origin,
    note: str,
    *neutral: object,
    endpoints: tuple[str, ...] = (CHAT, COMPLETIONS),
    expected: str = "",
    max_items: int | None = None,
) -> Parameter:
    """A parameter of which only the values that change nothing are allowed."""
    rule = Rule(neutral, expected=expected)
    return Parameter(name, origin, note, rule, endpoints=endpoints, max_items=max_items)
