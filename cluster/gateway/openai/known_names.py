"""Names of parameters and keys that are not known, and what they were probably meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from baton.core.errors import InvalidRequestError

MISNOMERS = {
    "slo_class": "choose an SLO class with 'service_tier', with the header X-Baton-SLO-Class or by the API key.",
    "extra_body": "write its keys beside the other parameters.",
    "enable_thinking": "put it into 'chat_template_kwargs'.",
    "response_format.name": "it belongs into 'json_schema', with the type 'json_schema'.",
    "response_format.schema": "it belongs into 'json_schema', with the type 'json_schema'.",
    "text.format.json_schema": "write its keys beside 'type'.",
    "tools[].function": "write its keys beside 'type'.",
    "tools[].name": "put it into 'function'.",
    "tools[].description": "put it into 'function'.",
    "tools[].parameters": "put it into 'function'.",
    "tools[].input_schema": "put it into 'function', as 'parameters'.",
    "tool_choice.name": "put it into 'function'.",
    "tool_choice.allowed_tools": "write its keys beside 'type'.",
}
"""Hints for unknown names, or their paths, whose closest match would mislead."""
_SAME = {"parameters": "input_schema", "input_schema": "parameters"}
"""Names for the same in different APIs."""
_INDEX = re.compile(r"\[\d+\]")


def check_known(
    names: Iterable[str],
    known: Iterable[str],
    what: str = "parameter",
    *,
    path: str = "",
    listed: Iterable[str] | None = None,
) -> None:
    """Raises :class:`InvalidRequestError` for the first of ``names`` that is not ``known``, with the closest match.

    Args:
        path: of the object whose keys the names are, as in ``messages[0]``; empty for the body.
        listed: the names to list where no match is close; ``None`` lists all.
    """
    known = sorted(set(known))
    listed = known if listed is None else listed
    for name in names:
        if name in known:
            continue
        name = name[:60]
        where = f"key in {path}:" if path else what
        param = f"{path}.{name}" if path else name
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(listed)}."
        hint = MISNOMERS.get(_INDEX.sub("[]", param), hint)
        if (same := _SAME.get(name)) in known:
            hint = f"send it as {same!r}."
        raise InvalidRequestError(f"Unknown {where} {name!r}; {hint}", param=param)
