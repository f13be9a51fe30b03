"""JSON schemas of the answers of ``/v1/messages`` and ``/v1/messages/count_tokens``, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.gateway.openai.answer_schemas import INTEGER, STRING, TRACE, Json, list_of, object_of, object_with, or_null

_BLOCKS = (
    object_of(type={"const": "text"}, text=STRING),
    object_of(type={"const": "thinking"}, thinking=STRING, signature=STRING),
    object_of(type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"}),
)
_STOP_REASONS = ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]

MESSAGES_SCHEMAS: Mapping[str, Json] = {
    "Message": object_with(
        TRACE,
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=list_of({"anyOf": list(_BLOCKS)}),
        stop_reason={"enum": _STOP_REASONS},
        stop_sequence=or_null(STRING),
        usage=object_of(
            input_tokens=INTEGER,
            cache_read_input_tokens=INTEGER,
            cache_creation_input_tokens=INTEGER,
            output_tokens=INTEGER,
            output_tokens_details=object_of(thinking_tokens=INTEGER),
        ),
    ),
    "TokenCount": object_of(input_tokens=INTEGER),
    "AnthropicError": object_of(
        type={"const": "error"}, error=object_of(type=STRING, message=STRING), request_id=STRING
    ),
}
