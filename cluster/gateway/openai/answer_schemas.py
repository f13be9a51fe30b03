"""JSON schemas of answers, for ``/openapi.json``. :mod:`cluster.gateway.openai.responses` makes the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.jobs.job_types import Status

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}


def ref(name: str) -> Json:
    """A reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(**properties: Json) -> Json:
    """An object of exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _object_with(optional: Mapping[str, Json], **properties: Json) -> Json:
    found = object_of(**properties)
    return {**found, "properties": {**properties, **optional}}


def _list_of(schema: Json) -> Json:
    return {"type": "array", "items": schema}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, choice: str) -> Json:
    return _object_with(
        {"service_tier": STRING},
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        choices=_list_of(ref(choice)),
        usage=ref("Usage"),
    )


def _page_of(name: str) -> Json:
    ends = {"first_id": _or_null(STRING), "last_id": _or_null(STRING)}
    return object_of(object={"const": "list"}, data=_list_of(ref(name)), **ends, has_more={"type": "boolean"})


_BATCH_STATES = tuple(map(str, Status))
_TOKEN: Mapping[str, Json] = {"token": STRING, "logprob": NUMBER, "bytes": _list_of(INTEGER)}
_FINISH_REASON: Json = {"enum": ["stop", "length"]}
_TOKEN_IDS: Mapping[str, Json] = {"token_ids": _list_of(INTEGER)}

ANSWER_SCHEMAS: Mapping[str, Json] = {
    "Object": {"type": "object"},
    "Error": object_of(
        error=_object_with(
            {"reason": STRING, "predicted_wait_ms": NUMBER},
            message=STRING,
            type=STRING,
            param=_or_null(STRING),
            code=STRING,
        )
    ),
    "Model": object_of(
        id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, root=STRING, max_model_len=INTEGER
    ),
    "ModelList": object_of(object={"const": "list"}, data=_list_of(ref("Model"))),
    "Version": object_of(version=STRING),
    "Tokens": object_of(
        count=INTEGER, max_model_len=INTEGER, tokens=_list_of(INTEGER), token_strs=_or_null(_list_of(STRING))
    ),
    "Text": object_of(prompt=STRING),
    "Usage": object_of(
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
        prompt_tokens_details=object_of(cached_tokens=INTEGER),
        completion_tokens_details=object_of(
            reasoning_tokens=INTEGER, accepted_prediction_tokens=INTEGER, rejected_prediction_tokens=INTEGER
        ),
    ),
    "CompletionChoice": _object_with(
        _TOKEN_IDS,
        index=INTEGER,
        text=STRING,
        logprobs=_or_null(
            object_of(
                tokens=_list_of(STRING),
                token_logprobs=_list_of(NUMBER),
                top_logprobs=_list_of({"type": "object", "additionalProperties": NUMBER}),
                text_offset=_list_of(INTEGER),
            )
        ),
        finish_reason=_FINISH_REASON,
    ),
    "Completion": _answer("text_completion", "CompletionChoice"),
    "ChatChoice": _object_with(
        _TOKEN_IDS,
        index=INTEGER,
        message=ref("ChatMessage"),
        logprobs=_or_null(
            object_of(
                content=_list_of(object_of(**_TOKEN, top_logprobs=_list_of(object_of(**_TOKEN)))),
                refusal={"type": "null"},
            )
        ),
        finish_reason={"enum": ["stop", "length", "tool_calls"]},
    ),
    "ChatMessage": _object_with(
        {"reasoning_content": STRING, "tool_calls": _list_of(ref("ToolCall"))},
        role={"const": "assistant"},
        content=_or_null(STRING),
        refusal={"type": "null"},
    ),
    "ToolCall": object_of(id=STRING, type={"const": "function"}, function=object_of(name=STRING, arguments=STRING)),
    "ChatCompletion": _answer("chat.completion", "ChatChoice"),
    "File": _object_with(
        {"expires_at": INTEGER},
        id=STRING,
        object={"const": "file"},
        bytes=INTEGER,
        created_at=INTEGER,
        filename=STRING,
        purpose={"enum": ["batch", "batch_output"]},
        status={"const": "processed"},
    ),
    "FileList": _page_of("File"),
    "DeletedFile": object_of(id=STRING, object={"const": "file"}, deleted={"const": True}),
    "Batch": object_of(
        id=STRING,
        object={"const": "batch"},
        endpoint=STRING,
        model=STRING,
        errors=_or_null(object_of(object={"const": "list"}, data=_list_of(ref("BatchError")))),
        input_file_id=STRING,
        completion_window=STRING,
        status={"enum": [*_BATCH_STATES]},
        output_file_id=_or_null(STRING),
        error_file_id=_or_null(STRING),
        created_at=INTEGER,
        expires_at=INTEGER,
        **{f"{state}_at": _or_null(INTEGER) for state in _BATCH_STATES if state != "validating"},
        request_counts=object_of(total=INTEGER, completed=INTEGER, failed=INTEGER),
        metadata=_or_null({"type": "object", "additionalProperties": STRING}),
    ),
    "BatchError": object_of(code=STRING, line=_or_null(INTEGER), message=STRING, param=_or_null(STRING)),
    "BatchList": _page_of("Batch"),
}
"""Answers that are not streamed; ``Object`` is any object."""
