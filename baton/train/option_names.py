"""Names the settings of a training run by the options of ``baton train``, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.config_section import option_name
from baton.train.options import KINDS

_OPTIONS = {
    "target": "--model",
    "max_prompt_tokens": "--max-answer-tokens",
    **{field: option_name(kind, field) for kind in KINDS.values() for field in kind.model_fields},
}
_DIGESTS = ("target", "prompts", "max_prompt_tokens")
"""Settings whose values are not shown: hashes, and values that follow from other settings."""
_DATASET = "dataset"


def what_differs(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Names the options whose values have changed, with both values where they are meaningful to users."""
    found: dict[str, str] = {}
    for name in sorted(stored.keys() | given.keys()):
        before, now = stored.get(name), given.get(name)
        if before == now:
            continue
        if name == _DATASET:
            found[name] = "the answers have changed, for example through a higher --tokens"
            continue
        option = _OPTIONS.get(name, name)
        if name not in _DIGESTS:
            found[option] = f"{option} is {_shown(now)} and was {_shown(before)}"
        elif option not in found:
            found[option] = f"{option} has changed"
    return "; ".join(found.values())


def _shown(value: object) -> str:
    if value is None:
        return "left out"
    if isinstance(value, list):
        return ",".join(f"{part}" for part in value)
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
