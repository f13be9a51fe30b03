"""Writes the page of all request parameters from the gateway's table: ``python -m tests.parameters_page``."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.gateway.openai.parameter_table import PARAMETERS
from cluster.gateway.openai.parameters import CHAT, COMPLETIONS, Parameter

PAGE = "docs/parameters.md"
_ENDPOINTS = {(CHAT, COMPLETIONS): "both", (CHAT,): "chat", (COMPLETIONS,): "completions"}
_HEAD = """# Request parameters

All parameters of `/v1/chat/completions` and `/v1/completions` that OpenAI, vLLM or SGLang document, and what baton does
with each. The gateway follows the same table. Null means absent everywhere.

* **Honoured** parameters have their usual effect. Whole numbers may be written as floats (`64.0`).
* **Accepted** parameters have no effect: any value of their type is allowed.
* **Refused** parameters would change the answer, and baton cannot honour them. Values that change nothing are allowed;
  others get a 400 `unsupported_parameter` that names the parameter.

Any other parameter is unknown. By default it gets a 400 with the nearest known name. With
`router.unknown_parameters: ignore` it is left out, and the header `X-Baton-Ignored-Parameters` of the answer names it
(at most 16 names; characters that a header cannot hold become `?`). This setting never applies to parameters below,
nor to keys within objects.

Bounds, so that no request holds up others: `logit_bias` and `stop_token_ids` have at most 1,024 entries, `metadata` and
`chat_template_kwargs` 64, `tools` 1,024, and `prompt` 1,024 prompts. `messages` has at most as many messages and
content parts as the context has tokens, and never more than 8,192. A body has at most 262,144 entries of arrays and
objects (or four times the context) and 32,768 keys.
"""
_TITLES = {"honoured": "Honoured", "accepted": "Accepted without effect", "refused": "Refused"}


def _cell(parameter: Parameter) -> str:
    if parameter.rule is None:
        return parameter.note
    allowed = " or ".join(f"`{json.dumps(value)}`" for value in parameter.rule.values)
    kind = parameter.rule.kind
    return f"{kind}: {parameter.note}" if kind else f"{parameter.note}; allowed: {allowed or 'null'}"


def render() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for treatment, title in _TITLES.items():
        rows = [row for row in PARAMETERS if row.treatment == treatment]
        lines = [f"| `{row.name}` | {row.origin} | {_ENDPOINTS[row.endpoints]} | {_cell(row)} |" for row in rows]
        parts.append(f"## {title}\n\n| | of | endpoint | |\n|---|---|---|---|\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    Path(PAGE).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
