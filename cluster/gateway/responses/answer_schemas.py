"""JSON schemas of the answers of ``/v1/responses``, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.gateway.openai.answer_schemas import (
    INTEGER,
    NUMBER,
    STRING,
    TRACE,
    Json,
    list_of,
    object_of,
    object_with,
    or_null,
    ref,
)

_ANY_OBJECT: Json = {"type": "object"}
_STATUS: Json = {"enum": ["completed", "incomplete"]}
_NO_LIST: Json = {"type": "array", "maxItems": 0}
_TEXT = object_of(type={"const": "output_text"}, text=STRING, annotations=_NO_LIST, logprobs=_NO_LIST)
_REASONING = object_of(type={"const": "reasoning_text"}, text=STRING)
_ITEMS = (
    object_of(
        id=STRING, type={"const": "message"}, role={"const": "assistant"}, status=_STATUS, content=list_of(_TEXT)
    ),
    object_of(id=STRING, type={"const": "reasoning"}, status=_STATUS, summary=_NO_LIST, content=list_of(_REASONING)),
    object_of(
        id=STRING, type={"const": "function_call"}, status=_STATUS, call_id=STRING, name=STRING, arguments=STRING
    ),
)

RESPONSES_SCHEMAS: Mapping[str, Json] = {
    "Response": object_with(
        TRACE,
        id=STRING,
        object={"const": "response"},
        created_at=INTEGER,
        completed_at=or_null(INTEGER),
        status=_STATUS,
        error={"type": "null"},
        incomplete_details=or_null(object_of(reason={"const": "max_output_tokens"})),
        instructions=or_null(STRING),
        max_output_tokens=or_null(INTEGER),
        metadata=_ANY_OBJECT,
        model=STRING,
        output=list_of({"anyOf": list(_ITEMS)}),
        parallel_tool_calls={"type": "boolean"},
        previous_response_id={"type": "null"},
        reasoning=object_of(effort=or_null(STRING), summary={"type": "null"}),
        background={"const": False},
        service_tier=or_null(STRING),
        store={"const": False},
        temperature=NUMBER,
        text=_ANY_OBJECT,
        tool_choice={"anyOf": [STRING, _ANY_OBJECT]},
        tools=list_of(_ANY_OBJECT),
        top_p=NUMBER,
        truncation={"const": "disabled"},
        usage=ref("ResponseUsage"),
    ),
    "ResponseUsage": object_of(
        input_tokens=INTEGER,
        input_tokens_details=object_of(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=object_of(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    ),
}
