"""The alternatives that a JSON schema of one argument has, for forms that do not write JSON everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.grammar.schema_walk import Schema, differ, options_of, resolved

_MAX_BRANCHES = 1000
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
JSON_TYPES = (*_TYPES.values(), "null")


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The alternatives of a schema.

    Attributes:
        branches: a schema for each, with at most one type. What cannot be taken apart is one of them.
        is_exclusive: whether a value must not follow several of them.
    """

    branches: Sequence[Schema]
    is_exclusive: bool

    @property
    def types(self) -> list[str]:
        """The JSON types of all of them; empty if they name none."""
        found: list[str] = []
        for branch in self.branches:
            kind, options = branch.get("type"), options_of(branch)
            found += [kind] if isinstance(kind, str) else [type_of(option) for option in options or ()]
        return list(dict.fromkeys(found))


def alternatives_of(schema: Schema) -> Alternatives:
    """The alternatives of ``anyOf``, ``oneOf`` and ``type``. References are those within ``schema``."""
    left, found, is_exclusive, num_seen = [resolved(schema, schema)], list[Schema](), False, 0
    while left:
        each = left.pop()
        num_seen += 1
        key = next((key for key in ("anyOf", "oneOf") if isinstance(each.get(key), list)), "")
        options = each.get(key) or ()
        rest = {name: value for name, value in each.items() if name != key}
        is_small = num_seen + len(left) + len(options) <= _MAX_BRANCHES  # references may form a circle
        parts = [resolved(option, schema) for option in options] if is_small else []
        if parts and not any(differ(part, rest) for part in parts):
            is_exclusive |= key == "oneOf"
            left += [resolved({**rest, **part}, schema) for part in reversed(parts)]
        else:
            kinds = each.get("type")
            found += [{**each, "type": kind} for kind in kinds] if isinstance(kinds, list) else [each]
    return Alternatives(found, is_exclusive)


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return _TYPES.get(type(value), "null")
