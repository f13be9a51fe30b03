"""Where in a schema the fault is for which a grammar is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from baton.grammar.schema_walk import DATA_KEYS, NAMED_SCHEMAS, Schema, pointer_keys, referred

_DEFINITIONS = ("$defs", "definitions")
_SHARED = (*_DEFINITIONS, "x-guidance")
"""What parts of a schema need of the whole."""
_MAX_TRIALS = 300
_MAX_SECONDS = 0.3

_Part = tuple[tuple[str, ...], Schema]
"""A part of a schema, and the keys that lead to it."""


def place_of_fault(whole: Any, is_at_fault: Callable[[Schema], bool]) -> str:
    """The path of the smallest part of a schema that alone is refused for the same reason, as ``properties.a.items``.

    It is empty where that is the whole, and that of a larger part after 300 trials or 0.3 s.

    Args:
        is_at_fault: whether a schema is refused for this reason.
    """
    if not isinstance(whole, Mapping):
        return ""
    shared = {key: whole[key] for key in _SHARED if key in whole}
    deadline, num_trials = time.monotonic() + _MAX_SECONDS, 0

    def fails(schema: Schema) -> bool:
        nonlocal num_trials
        num_trials += 1
        return num_trials <= _MAX_TRIALS and time.monotonic() <= deadline and is_at_fault({**shared, **schema})

    path: tuple[str, ...] = ()
    schema: Schema = whole
    followed: set[str] = set()
    while True:
        if found := _faulty(list(_parts(schema)), fails):
            path, schema = (*path, *found[0]), found[1]
            continue
        reference = schema.get("$ref")
        target = referred(reference, whole)
        is_new = isinstance(reference, str) and reference not in followed
        if not is_new or not isinstance(target, Mapping) or not fails(target):
            return ".".join(path)
        followed.add(str(reference))
        path, schema = pointer_keys(str(reference)), target


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
    """The schemas directly below a schema, definitions last: references lead to them."""
    for key in sorted(schema, key=lambda key: key in _DEFINITIONS):
        value = schema[key]
        if key in DATA_KEYS or key == "x-guidance":
            continue
        if isinstance(value, list):
            yield from (((key, str(index)), part) for index, part in enumerate(value) if isinstance(part, Mapping))
        elif isinstance(value, Mapping) and key in NAMED_SCHEMAS:
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, Mapping))
        elif isinstance(value, Mapping):
            yield (key,), value
