"""Writes the page of all request parameters from the gateway's table: ``python -m tests.parameters_page``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from cluster.gateway.anthropic.parameter_table import COUNT_TOKENS, MESSAGES, MESSAGES_PARAMETERS
from cluster.gateway.openai.parameter_table import PARAMETERS
from cluster.gateway.openai.parameters import CHAT, COMPLETIONS, Parameter
from cluster.gateway.responses.parameter_table import RESPONSES_PARAMETERS

PAGE = "docs/parameters.md"
_ENDPOINTS = {(CHAT, COMPLETIONS): "both", (CHAT,): "chat", (COMPLETIONS,): "completions"}
_MESSAGES_ENDPOINTS = {(MESSAGES, COUNT_TOKENS): "both", (MESSAGES,): "messages"}
_HEAD = """# Request parameters

All parameters of `/v1/chat/completions` and `/v1/completions` that OpenAI, vLLM or SGLang document, and those of
[`/v1/responses`](#v1responses) and [`/v1/messages`](#v1messages), with what baton does with each. The gateway follows
the same tables. Null means absent everywhere.

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
_RESPONSES_HEAD = """## /v1/responses

OpenAI's Responses API ([responses-and-messages.md](responses-and-messages.md)), and extensions of chats.
"""
_MESSAGES_HEAD = """## /v1/messages

Anthropic's Messages API ([responses-and-messages.md](responses-and-messages.md)), with `/v1/messages/count_tokens`,
which takes the parameters of a prompt, and extensions of chats.
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
    parts = [_HEAD, *_tables(PARAMETERS, "##", _ENDPOINTS)]
    parts += [_RESPONSES_HEAD, *_tables(RESPONSES_PARAMETERS, "###")]
    parts += [_MESSAGES_HEAD, *_tables(MESSAGES_PARAMETERS, "###", _MESSAGES_ENDPOINTS)]
    return "\n".join(parts)


def _tables(
    parameters: Iterable[Parameter], heading: str, endpoints: Mapping[tuple[str, ...], str] | None = None
) -> Iterable[str]:
    """A table for each treatment.

    Args:
        endpoints: short names of endpoints, for a column; ``None`` if there is only one.
    """
    head = "| | of | endpoint | |\n|---|---|---|---|\n" if endpoints else "| | of | |\n|---|---|---|\n"
    for treatment, title in _TITLES.items():
        lines = []
        for row in parameters:
            if row.treatment == treatment:
                place = f" {endpoints[row.endpoints]} |" if endpoints else ""
                lines.append(f"| `{row.name}` | {row.origin} |{place} {_cell(row)} |")
        yield f"{heading} {title}\n\n{head}" + "\n".join(lines) + "\n"


def main() -> None:
    Path(PAGE).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
