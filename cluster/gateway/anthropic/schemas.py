"""Requests of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from baton.core.errors import UnsupportedParameterError
from cluster.gateway.anthropic.parameter_table import (
    COUNT_TOKENS,
    MESSAGES,
    MESSAGES_PARAMETERS,
    PROMPT_PARAMETERS,
)
from cluster.gateway.openai.parameters import Parameter
from cluster.gateway.openai.schemas import CommonRequest, RequestSchema
from cluster.gateway.openai.shared_parameters import by_name

_STRING = {"type": "string"}
_WORD = {"type": "string", "minLength": 1}


def _block(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "cache_control": {}, **properties},
        "required": ["type", *required],
        "additionalProperties": False,
    }


def _text_or(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT, *blocks]}}]}


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": _text_or(*blocks)},
        "required": ["role", "content"],
        "additionalProperties": False,
    }


_TEXT = _block("text", "text", text=_STRING)
_SYSTEM = _text_or()
_RESULT = _block("tool_result", "tool_use_id", tool_use_id=_WORD, content=_text_or(), is_error={"type": "boolean"})
_USE = _block("tool_use", "id", "name", "input", id=_WORD, name=_WORD, input={"type": "object"})
_THINKING = _block("thinking", "thinking", thinking=_STRING, signature=_STRING)
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [_message("user", _RESULT), _message("assistant", _USE, _THINKING), _message("system")]},
}


class PromptRequest(RequestSchema):
    """The parameters of a prompt. Those of type ``Any`` are checked by the translation."""

    endpoint: ClassVar[str] = COUNT_TOKENS
    parameters: ClassVar[Mapping[str, Parameter]] = by_name(PROMPT_PARAMETERS)

    model: str | None = None
    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES)]
    system: Annotated[Any, WithJsonSchema(_SYSTEM)] = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


_FORMAT = "output_config.format for a schema; other grammars are for /v1/chat/completions"


class MessagesRequest(PromptRequest, CommonRequest):
    """A prompt and how to answer it."""

    endpoint: ClassVar[str] = MESSAGES
    parameters: ClassVar[Mapping[str, Parameter]] = by_name(MESSAGES_PARAMETERS)
    own_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "input": "messages",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "output_format": "output_config.format",
        "structured_outputs": _FORMAT,
        "guided_json": "output_config.format",
        "json_schema": "output_config.format",
        "text": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }

    max_tokens: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1})]
    stop_sequences: Annotated[list[str] | None, WithJsonSchema({"type": "array", "items": _WORD})] = None


def check_counted(names: Iterable[str]) -> None:
    """Raises :class:`UnsupportedParameterError`, as Anthropic refuses them too, for parameters of the answer."""
    for name in names:
        if name in MessagesRequest.parameters and name not in PromptRequest.parameters:
            raise UnsupportedParameterError(
                f"{name} is a parameter of {MESSAGES}, which does not change the number of tokens of a prompt. "
                f"Leave it out of {COUNT_TOKENS}.",
                param=name,
            )
