"""Where in a schema the fault is for which a grammar is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from baton.grammar.schema_walk import DATA_KEYS, NAMED_SCHEMAS

_SHARED = ("$defs", "definitions", "x-guidance")
"""What parts of a schema need of the whole."""
_MAX_TRIALS = 300
_MAX_SECONDS = 1.0


def place_of_fault(schema: Any, fails: Callable[[Mapping[str, Any]], bool]) -> str:
    """The path of the smallest part of a schema that alone is refused for the same reason, as ``properties.a.items``.

    It is empty where that is the whole, and ends early after 300 trials or a second.

    Args:
        fails: whether a schema is refused for this reason.
    """
    if not isinstance(schema, Mapping):
        return ""
    shared = {key: schema[key] for key in _SHARED if key in schema}
    path: list[str] = []
    deadline, num_trials, is_deeper = time.monotonic() + _MAX_SECONDS, 0, True
    while is_deeper:
        is_deeper = False
        for keys, part in _parts(schema):
            num_trials += 1
            if num_trials > _MAX_TRIALS or time.monotonic() > deadline:
                break
            if fails({**shared, **part}):
                path += keys
                schema, is_deeper = part, True
                break
    return ".".join(path)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The schemas directly below a schema, each with the keys that lead to it; definitions come first, since a part
    that refers to a wrong one is refused for the same reason."""
    for key in sorted(schema, key=lambda key: key not in ("$defs", "definitions")):
        value = schema[key]
        if isinstance(value, list) and key not in DATA_KEYS:
            items = {str(index): item for index, item in enumerate(value)}
        elif isinstance(value, Mapping) and key in NAMED_SCHEMAS:
            items = dict(value)
        elif isinstance(value, Mapping) and key not in DATA_KEYS and key != "x-guidance":
            yield (key,), value
            continue
        else:
            continue
        yield from (((key, name), item) for name, item in items.items() if isinstance(item, Mapping))
