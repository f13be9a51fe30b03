"""Reads plain values for a configuration and explains their errors. Independent of the particular keys."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, get_args

import yaml
from pydantic import BaseModel, ValidationError

from baton.core.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which PyYAML silently keeps the last.

    Scalars follow YAML 1.2: only true and false are booleans, so ``off`` is a string; ``1e9`` is a number.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: [(tag, pattern) for tag, pattern in resolvers if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                continue  # not hashable; construct_mapping refuses it
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_SECRET = "router.api_keys"
"""Values there may be keys, and no message quotes them."""

_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is unreadable, is not YAML, has a duplicate key, or has no mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot read the configuration {path}: {reason}.") from error
    try:
        values = _parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML{_fault(error)}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain keys and values, such as `model: ...`, got {_shown(values)}.")
    return values


def _fault(error: yaml.YAMLError | RecursionError) -> str:
    """The place and the reason of a YAML error. PyYAML's own text names no file, since it reads a string."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {str(error).splitlines()[0]}"
    mark = error.problem_mark or error.context_mark
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{place}: {', '.join(filter(None, (error.context, error.problem)))}"


def parse_override(text: str) -> tuple[str, Any]:
    """Parses ``"router.port=0"`` into ``("router.port", 0)``; the value is YAML.

    Raises:
        ConfigError: there is no ``=``, no key, or the value is not YAML.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key or not all(key.split(".")):
        raise ConfigError(f"--set {text}: expected KEY=VALUE with a dotted key, such as --set router.port=0.")
    try:
        return key, _parse(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--set {text}: the value is not valid YAML{_fault(error)}.") from error


def merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``values`` with every dotted key of ``overrides`` set; missing sections are created."""
    merged = _copy(values)
    for dotted, value in overrides.items():
        *sections, last = dotted.split(".")
        place = merged
        for section in sections:
            inner = place.get(section)
            if inner is None:
                inner = place[section] = {}
            elif not isinstance(inner, dict):
                raise ConfigError(f"--set {dotted}: {section} is {_shown(inner)}, not a section with keys.")
            place = inner
        place[last] = value
    return merged


def explain(error: ValidationError, schema: type[BaseModel], source: str, overrides: Sequence[str] = ()) -> str:
    """Describes every fault of the configuration, one per line.

    Args:
        source: the file or other place that the values come from.
        overrides: dotted keys from the command line; their faults are attributed to ``--set``.
    """
    lines = []
    for fault in error.errors():
        path = ".".join(str(part) for part in fault["loc"] if part != "[key]")  # pydantic's mark of a wrong key
        from_override = any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in overrides)
        lines.append(f"{'--set' if from_override else source}: {_explain_one(path, dict(fault), schema)}")
    return "\n".join(lines)


def _explain_one(path: str, fault: dict[str, Any], schema: type[BaseModel]) -> str:
    kind, message, value = fault["type"], str(fault["msg"]), fault["input"]
    shown = "something else" if path.startswith(_SECRET) else _shown(value)
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(path, schema)
    if kind == "value_error":
        reason = message.removeprefix("Value error, ")
        return f"{path}: {reason}." if path else f"{reason}."
    if kind == "missing":
        return f"{path} is missing and has no default; add it."
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path} must be a section with keys of its own, got {shown}."
    if kind in ("bool_parsing", "bool_type"):
        return f"{path} must be true or false, got {shown}."
    text = message.replace("Input should be", "must be").replace("String should have", "must have")
    near = _nearest(value, fault.get("ctx", {}).get("expected", ""))
    return f"{path} {text}, got {shown}.{near}"


def _unknown_key(path: str, schema: type[BaseModel]) -> str:
    *sections, key = path.split(".")
    section: type[BaseModel] = schema
    for name in sections:
        section = _keys(section).get(name) or section
    known = sorted(_keys(section))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    near = f" Did you mean {'.'.join([*sections, close[0]])}?" if close else ""
    hint = _same_key_elsewhere(key, schema) or near
    where = f"in {'.'.join(sections)}" if sections else "at the top level"
    return f"unknown key {path}.{hint} Known keys {where}: {', '.join(known)}."


def _same_key_elsewhere(key: str, schema: type[BaseModel]) -> str:
    sections = [name for name, inner in _keys(schema).items() if inner is not None and key in _keys(inner)]
    return f" Did you mean {' or '.join(f'{name}.{key}' for name in sections)}?" if sections else ""


def _keys(schema: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The keys of a section, each with its section, or that of the items of its list or mapping, or ``None``."""
    keys: dict[str, type[BaseModel] | None] = {}
    for name, field in schema.model_fields.items():
        keys[field.alias or name] = next(
            (kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)), None
        )
    return keys


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _nearest(value: object, expected: str) -> str:
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, [name for name in expected.split("'") if name.strip()], n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def _parse(text: str) -> Any:
    values = yaml.load(text, Loader=_StrictLoader)  # safe: a subclass of SafeLoader
    try:
        json.dumps(values, default=str, skipkeys=True)
    except ValueError as error:
        raise yaml.YAMLError("an alias refers to a mapping or list that contains it") from error
    return values


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _shown(value: object) -> str:
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
