"""The values of a configuration as users see them: as YAML, without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cluster.config.config import BatonConfig

_HIDDEN = "***"
_SECRET_KEYS = frozenset({"key_sha256"})
_URL_PASSWORDS = re.compile(r"(^\w[\w+.-]*://[^/:]*:).*(?=@)|([?&]\w*password=)[^&]*")
_MAX_CHARS = 60


def shown_config(config: BatonConfig, *, is_whole: bool) -> str:
    """A configuration as YAML, without secrets, and with the default behind each key that differs from it.

    Args:
        is_whole: show every key; otherwise, only those that differ from the defaults.
    """
    return "".join(f"{line}\n" for line in _lines(config.to_dict(), BatonConfig().to_dict(), is_whole))


def shown_change(before: object, after: object) -> str:
    """``old → new``, in short and without secrets; ``changed`` if that shows no difference."""
    old, new = _in_short(before), _in_short(after)
    return "changed" if old == new else f"{old} → {new}"


def _in_short(value: object) -> str:
    text = yaml.safe_dump(_without_secrets(value), default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"


def _lines(values: Mapping[str, Any], defaults: Mapping[str, Any], is_whole: bool, indent: str = "") -> Iterator[str]:
    """YAML of the values. Mappings with other keys than by default, such as classes by name, are whole."""
    for key, value in values.items():
        default = defaults[key]
        if value == default and not is_whole:
            continue
        is_section = isinstance(value, Mapping) and isinstance(default, Mapping) and value.keys() == default.keys()
        if is_section and value:
            yield f"{indent}{key}:"
            yield from _lines(value, default, is_whole, f"{indent}  ")
            continue
        text = yaml.safe_dump(_without_secrets({key: value}), sort_keys=False, width=float("inf"), allow_unicode=True)
        lines = text.splitlines()
        if value != default:
            lines[0 if isinstance(value, Mapping | list) else -1] += f"  # default: {_in_short(default)}"
        yield from (indent + line for line in lines)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if key in _SECRET_KEYS and inner is not None else _without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    if isinstance(value, str):
        return _URL_PASSWORDS.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", value)
    return value
