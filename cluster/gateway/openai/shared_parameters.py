"""Parameters of chats that the APIs translated to chats have under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cluster.gateway.openai.json_body import without_nulls
from cluster.gateway.openai.parameter_table import parameters_of
from cluster.gateway.openai.parameters import CHAT, Parameter
from cluster.gateway.openai.schemas import ChatCompletionRequest, CommonRequest

EXTENSIONS = (
    "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "skip_special_tokens",
    "include_stop_str_in_output", "speculation", "truncate_prompt_tokens", "cache_salt",
)  # fmt: skip
"""Those that neither OpenAI's Responses API nor Anthropic's Messages API documents."""


def as_in_chats(endpoint: str, names: Iterable[str]) -> list[Parameter]:
    """The rows of parameters that ``endpoint`` treats as chats do."""
    return [replace(parameters_of(CHAT)[name], endpoints=(endpoint,)) for name in names]


def by_name(rows: Iterable[Parameter]) -> Mapping[str, Parameter]:
    return {row.name: row for row in rows}


def chat_of(request: CommonRequest, **translated: Any) -> ChatCompletionRequest:
    """A chat with the parameters that ``request`` has in common with it, and ``translated`` ones that are not null."""
    common = {name: getattr(request, name) for name in CommonRequest.model_fields}
    return ChatCompletionRequest.model_validate(common | without_nulls(translated))
