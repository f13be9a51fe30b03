"""JSON schemas of answers, for ``/openapi.json``. :mod:`cluster.gateway.openai.responses` makes the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.rounds import Verdict
from cluster.jobs.job_types import Status

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}


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


def object_with(optional: Mapping[str, Json], **properties: Json) -> Json:
    """An object that may have ``optional`` properties, too."""
    found = object_of(**properties)
    return {**found, "properties": {**properties, **optional}}


def list_of(schema: Json) -> Json:
    return {"type": "array", "items": schema}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, choice: str, optional: Mapping[str, Json] | None = None) -> Json:
    return object_with(
        {"service_tier": STRING, **(optional or {})},
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        choices=list_of(ref(choice)),
        usage=ref("Usage"),
    )


def _page_of(name: str) -> Json:
    ends = {"first_id": or_null(STRING), "last_id": or_null(STRING)}
    return object_of(object={"const": "list"}, data=list_of(ref(name)), **ends, has_more={"type": "boolean"})


_BATCH_STATES = tuple(map(str, Status))
_TOKEN: Mapping[str, Json] = {"token": STRING, "logprob": NUMBER, "bytes": list_of(INTEGER)}
_FINISH_REASON: Json = {"enum": ["stop", "length"]}
_TOKEN_IDS: Mapping[str, Json] = {"token_ids": list_of(INTEGER)}
TRACE: Mapping[str, Json] = {"speculation": ref("Speculation")}
"""The trace of an answer, if its request asked for it."""
_RANKED = object_of(logprob=NUMBER, rank=INTEGER, decoded_token=STRING)
_PROMPT_LOGPROBS: Mapping[str, Json] = {
    "prompt_logprobs": list_of(or_null({"type": "object", "additionalProperties": _RANKED}))
}
"""Of each token of the prompt, by token id; null for the first one."""

ANSWER_SCHEMAS: Mapping[str, Json] = {
    "Object": {"type": "object"},
    "Error": object_of(
        error=object_with(
            {"reason": STRING, "predicted_wait_ms": NUMBER},
            message=STRING,
            type=STRING,
            param=or_null(STRING),
            code=STRING,
        )
    ),
    "Model": object_of(
        id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, root=STRING, max_model_len=INTEGER
    ),
    "ModelList": object_of(object={"const": "list"}, data=list_of(ref("Model")), slo_classes=list_of(STRING)),
    "Method": object_of(
        method=STRING,
        title=STRING,
        available=BOOLEAN,
        setting=or_null(STRING),
        idea=STRING,
        setup=STRING,
        length=STRING,
        use=STRING,
        year=INTEGER,
        paper=object_of(title=STRING, url=STRING),
        prompt=STRING,
    ),
    "MethodList": object_of(object={"const": "list"}, data=list_of(ref("Method"))),
    "Version": object_of(version=STRING),
    "Tokens": object_of(
        count=INTEGER, max_model_len=INTEGER, tokens=list_of(INTEGER), token_strs=or_null(list_of(STRING))
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
    "Speculation": object_of(rounds=list_of(ref("Round")), left_out=INTEGER),
    "Round": object_of(
        method=or_null(STRING),
        draft=object_of(
            token_ids=list_of(INTEGER), texts=list_of(STRING), parents=list_of(INTEGER), accepted=list_of(BOOLEAN)
        ),
        output=object_of(
            token_ids=list_of(INTEGER), texts=list_of(STRING), verdicts=list_of({"enum": [*map(str, Verdict)]})
        ),
        draft_ms=NUMBER,
        verify_ms=NUMBER,
        batch_sequences=INTEGER,
    ),
    "CompletionChoice": object_with(
        {**_TOKEN_IDS, **_PROMPT_LOGPROBS, **TRACE},
        index=INTEGER,
        text=STRING,
        logprobs=or_null(
            object_of(
                tokens=list_of(STRING),
                token_logprobs=list_of(or_null(NUMBER)),
                top_logprobs=list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
                text_offset=list_of(INTEGER),
            )
        ),
        finish_reason=_FINISH_REASON,
    ),
    "Completion": _answer("text_completion", "CompletionChoice"),
    "ChatChoice": object_with(
        {**_TOKEN_IDS, **TRACE},
        index=INTEGER,
        message=ref("ChatMessage"),
        logprobs=or_null(
            object_of(
                content=list_of(object_of(**_TOKEN, top_logprobs=list_of(object_of(**_TOKEN)))),
                refusal={"type": "null"},
            )
        ),
        finish_reason={"enum": ["stop", "length", "tool_calls"]},
    ),
    "ChatMessage": object_with(
        {"reasoning_content": STRING, "tool_calls": list_of(ref("ToolCall"))},
        role={"const": "assistant"},
        content=or_null(STRING),
        refusal={"type": "null"},
    ),
    "ToolCall": object_of(id=STRING, type={"const": "function"}, function=object_of(name=STRING, arguments=STRING)),
    "ChatCompletion": _answer("chat.completion", "ChatChoice", _PROMPT_LOGPROBS),
    "File": object_with(
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
        errors=or_null(object_of(object={"const": "list"}, data=list_of(ref("BatchError")))),
        input_file_id=STRING,
        completion_window=STRING,
        status={"enum": [*_BATCH_STATES]},
        output_file_id=or_null(STRING),
        error_file_id=or_null(STRING),
        created_at=INTEGER,
        expires_at=INTEGER,
        **{f"{state}_at": or_null(INTEGER) for state in _BATCH_STATES if state != "validating"},
        request_counts=object_of(total=INTEGER, completed=INTEGER, failed=INTEGER),
        metadata=or_null({"type": "object", "additionalProperties": STRING}),
    ),
    "BatchError": object_of(code=STRING, line=or_null(INTEGER), message=STRING, param=or_null(STRING)),
    "BatchList": _page_of("Batch"),
}
"""Answers that are not streamed; ``Object`` is any object."""
