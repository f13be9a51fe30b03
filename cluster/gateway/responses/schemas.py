"""Requests of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from cluster.gateway.openai.parameters import Parameter
from cluster.gateway.openai.schemas import CommonRequest
from cluster.gateway.openai.shared_parameters import by_name
from cluster.gateway.responses.parameter_table import RESPONSES, RESPONSES_PARAMETERS

_STRING = {"type": "string"}
_WORD = {"type": "string", "minLength": 1}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _parts(*kinds: str) -> dict[str, Any]:
    part = _object(("type", "text"), type={"enum": list(kinds)}, text=_STRING)
    return {"anyOf": [_STRING, {"type": "array", "items": part}]}


def _items_of(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    shared = {"id": _STRING, "status": {"enum": ["in_progress", "completed", "incomplete"]}}
    return _object(("type", *required), type={"const": kind}, **shared, **properties)


def _message(roles: list[str], *kinds: str) -> dict[str, Any]:
    return _object(("role", "content"), type={"const": "message"}, role={"enum": roles}, content=_parts(*kinds))


_TEXTS = {"type": "array", "items": _object(("type", "text"), type=_STRING, text=_STRING)}
_CALL = _items_of(
    "function_call",
    "call_id",
    "name",
    "arguments",
    call_id=_WORD,
    name=_WORD,
    arguments=_STRING,
    parsed_arguments={},  # of OpenAI's client
)
_INPUT = {
    "anyOf": [
        _STRING,
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _message(["system", "developer", "user"], "input_text"),
                    _message(["assistant"], "output_text"),
                    _CALL,
                    _items_of("function_call_output", "call_id", "output", call_id=_WORD, output=_parts("input_text")),
                    _items_of("reasoning", "summary", summary=_TEXTS, content=_TEXTS),
                ]
            },
        },
    ]
}


_FORMAT = "text.format for a schema; other grammars are for /v1/chat/completions"


class ResponsesRequest(CommonRequest):
    """The honoured parameters. Those of type ``Any`` are checked by the translation."""

    endpoint: ClassVar[str] = RESPONSES
    parameters: ClassVar[Mapping[str, Parameter]] = by_name(RESPONSES_PARAMETERS)
    own_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "structured_outputs": _FORMAT,
        "guided_json": "text.format",
        "json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] | None = None
    include: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
