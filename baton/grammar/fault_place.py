"""Where in a schema the fault is for which a grammar is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from baton.grammar.schema_walk import DATA_KEYS, NAMED_SCHEMAS, Schema

_DEFINITIONS = ("$defs", "definitions")
_SHARED = (*_DEFINITIONS, "x-guidance")
"""What parts of a schema need of the whole."""
_MAX_TRIALS = 300
_MAX_SECONDS = 0.3

_Part = tuple[tuple[str, ...], Schema]
"""A part of a schema, and the keys that lead to it."""


def smallest_fault(whole: Schema, is_at_fault: Callable[[Schema], bool]) -> tuple[str, Schema]:
    """The smallest part of a schema that alone is refused for the same reason, after its path, as
    ``properties.a.items``. The path is empty for the whole.

    A larger part is named if it is not found within 300 trials or 0.3 s.

    Args:
        is_at_fault: whether a schema is refused for this reason.
    """
    deadline, num_trials = time.monotonic() + _MAX_SECONDS, 0
    shared = {key: whole[key] for key in _SHARED if key in whole}

    def fails(schema: Schema) -> bool:
        nonlocal num_trials
        num_trials += 1
        return num_trials <= _MAX_TRIALS and time.monotonic() <= deadline and is_at_fault(schema)

    # References lead from part to part, so that each of them fails: at first, none is followed.
    found = _descend(_without_references(whole), fails)
    within = _at(whole, found[0])
    if not found[0] or not is_at_fault({**shared, **within}):
        found = _descend(whole, lambda schema: fails({**shared, **schema}))
        within = _at(whole, found[0])
    return ".".join(found[0]), {**shared, **within}


def _descend(schema: Schema, fails: Callable[[Schema], bool]) -> _Part:
    path: tuple[str, ...] = ()
    while (part := _faulty(list(_parts(schema)), fails)) is not None:
        path, schema = (*path, *part[0]), part[1]
    return path, schema


def _faulty(parts: Sequence[_Part], fails: Callable[[Schema], bool]) -> _Part | None:
    """One of the parts that fails; halves them, as long as they fail together for the same reason."""
    left = parts
    while len(left) > 1:
        half = left[: len(left) // 2]
        left = half if fails({"prefixItems": [part for _, part in half]}) else left[len(half) :]
    if left and fails(left[0][1]):
        return left[0]
    return next((part for part in parts if fails(part[1])), None)


def _parts(schema: Schema) -> Iterator[_Part]:
    """The schemas directly below a schema, definitions first: what refers to a wrong one fails, too."""
    for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):
        value = schema[key]
        if key in DATA_KEYS or key == "x-guidance":
            continue
        if isinstance(value, list):
            yield from (((key, str(index)), part) for index, part in enumerate(value) if isinstance(part, Mapping))
        elif isinstance(value, Mapping) and key in NAMED_SCHEMAS:
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, Mapping))
        elif isinstance(value, Mapping):
            yield (key,), value


def _at(schema: Any, path: Sequence[str]) -> Schema:
    for key in path:
        schema = schema[int(key)] if isinstance(schema, list) else schema[key]
    found: Schema = schema
    return found


def _without_references(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if key != "$ref" or not isinstance(inner, str)}
        return {key: inner if key in DATA_KEYS else _without_references(inner) for key, inner in kept.items()}
    return [_without_references(inner) for inner in value] if isinstance(value, list) else value
