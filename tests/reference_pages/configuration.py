"""The page of all configuration keys, from the classes of the sections and the comments of ``deploy/local.yaml``."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

from baton.core.config_section import Section, format_duration
from cluster.config.config import BatonConfig
from tests.reference_pages.markdown import code, plain, prose, table

_FILE = Path(__file__).parents[2] / "deploy" / "local.yaml"
_LINE = re.compile(r"(?P<indent> *)(?P<key>\w+):[^#]*?(?:\s#\s*(?P<comment>.*))?")
_MORE = re.compile(r"\s+#\s*(.*)")
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_DURATION = "duration"
_TYPES: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "text"}
_HEAD = """# Configuration

Every key of the YAML file that `baton up -c FILE` reads, with its type, its bounds and its default.
[`deploy/local.yaml`](../../deploy/local.yaml) is the same as a file, to copy and to change. `--set KEY=VALUE`
overrides one key: `baton up --set router.port=8001`. An unknown key and a value out of bounds are refused by name.

A *duration* has a unit (`500ms`, `2s`, `10min`, `1h`); a bare number is in seconds. Relative paths are resolved
against the file's folder. [Upgrades](../upgrades.md#what-each-key-needs) says which keys a running cluster takes over.

This page is generated: `python -m tests.reference_pages`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration, with Markdown for its columns."""

    path: str
    type: str
    default: str
    meaning: str


@cache
def comments() -> dict[str, str]:
    """The comments of ``deploy/local.yaml`` by dotted key; that of a section or a key at the top is above it."""
    found: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            above.append(line[1:].strip())
        elif more := _MORE.fullmatch(line):
            found[".".join(path)] += f" {more[1]}"
        elif key := _LINE.fullmatch(line):
            path[len(key["indent"]) // 2 :] = [key["key"]]
            found[".".join(path)] = " ".join([*above, key["comment"] or ""]).strip()
            above = []
        else:
            above = []
    return found


@cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The texts below the fields of a section, those of its bases included."""
    found: dict[str, str] = {}
    for owner in reversed([base for base in section.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = str(text.value.value).replace("``", "")
    return found


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """All keys of a section and of the sections in it, in their order."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner, suffix = _section_in(field.annotation)
        if inner is None or suffix or get_origin(field.annotation) is not None:
            kind = _type(field.annotation, field.metadata, in_seconds=name.endswith("_s"))
            yield Key(path, kind, _default(field, kind), _meaning(path, section, name))
        if inner is not None:
            yield from keys(inner, f"{path}{suffix}.")


def _meaning(path: str, section: type[BaseModel], name: str) -> str:
    comment = comments().get(path, "")
    return plain(docstrings(section).get(name, comment) if not comment or "..." in comment else comment)


def _section_in(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section that a key holds, and what stands for one of several: ``[]`` in a list, ``.NAME`` in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, ""
    suffix = {list: "[]", dict: ".NAME"}.get(get_origin(annotation) or object, "")
    for part in get_args(annotation):
        found, further = _section_in(part)
        if found is not None:
            return found, suffix + further
    return None, ""


def _type(annotation: Any, metadata: Sequence[Any] = (), *, in_seconds: bool = False) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], [*parts[1:], *metadata], in_seconds=in_seconds)
    if origin in (Union, UnionType):
        kinds = [_type(part, metadata, in_seconds=in_seconds) for part in parts if part is not NoneType]
        kinds += ["null"] if NoneType in parts else []
        return (", or " if any("," in kind for kind in kinds) else " or ").join(kinds)
    if origin is Literal:
        return ", ".join(code(str(value)) for value in parts)
    if origin is list:
        return f"list of {_type(parts[0])}s" if _section_in(parts[0])[0] else f"list of {_type(parts[0])}"
    if origin is dict:
        return f"mapping to {_type(parts[1])}"
    if _section_in(annotation)[0] is not None:
        return "section"
    if any(isinstance(one, PlainSerializer) for one in metadata):
        return _DURATION
    return f"{_TYPES[annotation]}{' of seconds' if in_seconds else ''}{_bounds(metadata)}"


def _bounds(metadata: Sequence[Any]) -> str:
    limits: dict[str, float] = {}
    for one in metadata:
        for constraint in one.metadata if isinstance(one, FieldInfo) else [one]:
            limits |= {name: getattr(constraint, name) for name in _BOUNDS if hasattr(constraint, name)}
    return "".join(f", {_BOUNDS[name]} {limit:,}" for name, limit in limits.items() if limit is not None)


def _default(field: FieldInfo, kind: str) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, dict) and value:
        return ", ".join(map(code, value))
    is_duration = kind.startswith(_DURATION) and value is not None
    return code(format_duration(value) if is_duration else value if isinstance(value, str) else json.dumps(value))


def render() -> str:
    """The text of the page."""
    sections = BatonConfig.section_names()
    groups: dict[str, list[Key]] = {}
    for key in keys(BatonConfig):
        first = key.path.partition(".")[0].partition("[")[0]
        groups.setdefault(first if first in sections else "", []).append(key)
    parts = [_HEAD]
    for name, rows in groups.items():
        head = f"## {name}\n\n{prose(comments()[name])}\n" if name else "## The model\n"
        cells = [(code(row.path), row.type, row.default, row.meaning) for row in rows]
        parts.append(f"{head}\n{table(['key', 'type', 'default', ''], cells)}")
    return "\n".join(parts)
