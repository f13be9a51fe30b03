"""How to find one's way in a JSON schema."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are data instead of schemas."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a schema whose values are objects of schemas by names, which may look like keywords."""


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas in a schema that are objects. Each may be changed before the next one is asked for."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in NAMED_SCHEMAS and isinstance(inner, dict):
                    left += inner.values()
                elif key not in DATA_KEYS:
                    left.append(inner)


def place_of(keyword: str, schema: Any) -> str:
    """The path of the first object in a schema that has a keyword, as in ``properties.a.items``; empty for the schema
    itself, and where there is none."""
    left: deque[tuple[Any, tuple[str, ...], bool]] = deque([(schema, (), True)])
    while left:
        value, path, is_schema = left.popleft()
        if isinstance(value, dict):
            if is_schema and keyword in value:
                return ".".join(path)
            items = ((key, inner) for key, inner in value.items() if not (is_schema and key in DATA_KEYS))
            left += ((inner, (*path, key), not (is_schema and key in NAMED_SCHEMAS)) for key, inner in items)
        elif isinstance(value, list):
            left += ((inner, (*path, str(index)), True) for index, inner in enumerate(value))
    return ""


def referred(reference: Any, schema: Any) -> Any:
    """What a reference within the schema leads to; ``None`` if it leads elsewhere or nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found
