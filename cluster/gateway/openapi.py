"""The description of the HTTP API (OpenAPI 3.1), from the endpoints, the request schemas and the parameter table."""

from __future__ import annotations

import html
import re
from typing import Any, get_args

from pydantic import BaseModel

from baton.core.roles import POOLS
from baton.core.version import package_version
from baton.explain.timelines import Order
from cluster.gateway.anthropic.answer_schemas import MESSAGES_SCHEMAS
from cluster.gateway.anthropic.errors import has_anthropic_form
from cluster.gateway.anthropic.schemas import MessagesRequest, PromptRequest
from cluster.gateway.endpoints import ENDPOINTS, Endpoint
from cluster.gateway.jobs.answers import MAX_BATCHES_LISTED, MAX_FILES_LISTED, ORDERS
from cluster.gateway.jobs.batches_endpoint import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE
from cluster.gateway.jobs.files_endpoint import EXPIRY_ANCHOR, FILE_FIELD, LONGEST_EXPIRY_S, SHORTEST_EXPIRY_S
from cluster.gateway.openai.answer_schemas import ANSWER_SCHEMAS, object_of, ref
from cluster.gateway.openai.parameters import Parameter
from cluster.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, RequestSchema
from cluster.gateway.openai.tokenize_schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from cluster.gateway.responses.answer_schemas import RESPONSES_SCHEMAS
from cluster.gateway.responses.schemas import ResponsesRequest
from cluster.jobs.job_types import ENDPOINTS as ENDPOINTS_OF_LINES
from cluster.jobs.jobs import BATCH_PURPOSE

Json = dict[str, Any]

MAX_LISTED = 1000
MAX_WORKERS = 4096
_SCHEMAS = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest, PromptRequest)
_REQUESTS: dict[str, type[RequestSchema]] = {schema.endpoint: schema for schema in _SCHEMAS}
_TOKENIZER_REQUESTS: dict[str, tuple[type[BaseModel], ...]] = {
    "/tokenize": (TokenizeTextRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
}
_EVENT: Json = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""A server-sent event: JSON in ``data``, or ``[DONE]``."""
_TEXT_TYPES = {
    "/docs": "text/html",
    "/v1/files/{file_id}/content": "application/octet-stream",
}
_EXPIRY: Json = {
    "anchor": {"const": EXPIRY_ANCHOR},
    "seconds": {"type": "integer", "minimum": SHORTEST_EXPIRY_S, "maximum": LONGEST_EXPIRY_S},
}
_FILE_FORM: Json = {
    "type": "object",
    "properties": {
        "purpose": {"const": BATCH_PURPOSE, "description": "what the file is for"},
        FILE_FIELD: {"type": "string", "format": "binary", "description": "a request as JSON in each line"},
        **{
            f"expires_after[{name}]": {**of, "description": "when the file is deleted; absent: never"}
            for name, of in _EXPIRY.items()
        },
    },
    "required": ["purpose", FILE_FIELD],
    "additionalProperties": False,
}
_BATCH: Json = {
    "type": "object",
    "properties": {
        "input_file_id": {"type": "string", "minLength": 1, "description": "a file with the purpose batch"},
        "endpoint": {"enum": list(ENDPOINTS_OF_LINES), "description": "the url of all lines"},
        "completion_window": {
            "type": "string",
            "pattern": "^([1-9]|1[0-9]|2[0-4])h$",
            "description": "when the batch expires: a duration of a second to a day, such as 24h",
        },
        "metadata": {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": MAX_METADATA,
                    "propertyNames": {"maxLength": MAX_METADATA_KEY},
                    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
                },
                {"type": "null"},
            ],
            "description": "strings that are kept with the batch",
        },
        "output_expires_after": {
            "anyOf": [object_of(**_EXPIRY), {"type": "null"}],
            "description": "when its files are deleted; null: after jobs.keep_days",
        },
    },
    "required": ["input_file_id", "endpoint", "completion_window"],
    "additionalProperties": False,
}
_NAME = re.compile(r"\{(\w+)\}")


def describe_api() -> Json:
    """The document that ``/openapi.json`` serves."""
    schemas: Json = {**ANSWER_SCHEMAS, **RESPONSES_SCHEMAS, **MESSAGES_SCHEMAS}
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "baton", "version": package_version()},
        "security": [{}, {"ApiKey": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"ApiKey": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, schemas: Json) -> Json:
    text = {_TEXT_TYPES.get(endpoint.path, "text/plain"): {"schema": {"type": "string"}}}
    content: Json = {"application/json": {"schema": ref(endpoint.answer)}} if endpoint.answer else text
    if endpoint.path == "/admin/live":
        content = {"text/event-stream": {"schema": _EVENT}}
    if endpoint.path == "/":
        content["text/html"] = {"schema": {"type": "string"}}
    operation: Json = {"summary": endpoint.summary}
    names = _NAME.findall(endpoint.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if endpoint.method == "GET":
        parameters += [{"name": name, "in": "query", "schema": of} for name, of in _queries(endpoint.path).items()]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.name == "POST /v1/files":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FILE_FORM}}}
    elif (body := _body(endpoint, schemas)) is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if endpoint.path in _REQUESTS and "stream" in _REQUESTS[endpoint.path].model_fields:
        content["text/event-stream"] = {"schema": _EVENT}
    error = ref("AnthropicError" if has_anthropic_form(endpoint.path) else "Error")
    refusal = {"description": "An error", "content": {"application/json": {"schema": error}}}
    operation["responses"] = {"200": {"description": "Success", "content": content}, "default": refusal}
    return operation


def _queries(path: str) -> Json:
    """The query parameters of a list."""
    if path == "/v1/requests":
        return {"order": {"enum": list(get_args(Order))}, "limit": _limit(MAX_LISTED)}
    if path == "/v1/files":
        more = {"order": {"enum": list(ORDERS)}, "purpose": {"type": "string"}}
        return {"after": {"type": "string"}, "limit": _limit(MAX_FILES_LISTED), **more}
    if path == "/admin/live":
        return {"snapshots": _limit(MAX_LISTED)}
    if path == "/admin/advise":
        return {"max_age_s": _limit(MAX_LISTED)}
    if path == "/v1/batches":
        return {"after": {"type": "string"}, "limit": _limit(MAX_BATCHES_LISTED)}
    return {}


def _limit(largest: int) -> Json:
    return {"type": "integer", "minimum": 1, "maximum": largest}


def _body(endpoint: Endpoint, schemas: Json) -> Json | None:
    if endpoint.path in _REQUESTS:
        schema = _REQUESTS[endpoint.path]
        schemas[schema.__name__] = _request_schema(schema, schemas)
        return ref(schema.__name__)
    if endpoint.path in _TOKENIZER_REQUESTS:
        return {"anyOf": [schema.model_json_schema() for schema in _TOKENIZER_REQUESTS[endpoint.path]]}
    if endpoint.name == "POST /v1/batches":
        return _BATCH
    if endpoint.path == "/admin/scale":
        workers = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}, {"const": "auto"}]}
        return {**object_of(**dict.fromkeys(POOLS, workers)), "required": [], "minProperties": 1}
    if endpoint.path == "/admin/move":
        return object_of(**{"from": {"enum": list(POOLS)}, "to": {"enum": list(POOLS)}})
    return None


def _request_schema(schema: type[RequestSchema], schemas: Json) -> Json:
    """The body of a generation endpoint: the fields of its schema, and the other parameters of the table."""
    fields = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(fields.pop("$defs", {}))
    required = fields.get("required", [])
    properties = {
        name: _property(parameter, fields["properties"].get(name), is_required=name in required)
        for name, parameter in schema.parameters.items()
    }
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _property(parameter: Parameter, field: Json | None, *, is_required: bool) -> Json:
    found: Json = {"description": parameter.note}
    if parameter.max_items is not None:
        found |= {"maxItems": parameter.max_items, "maxProperties": parameter.max_items}
    if parameter.rule is not None:
        return found | parameter.rule.schema()
    if field is None:
        raise RuntimeError(f"the parameter {parameter.name} is honoured but has no field")
    field = {key: value for key, value in field.items() if key not in ("title", "default")}
    null: Json = {"type": "null"}
    return found | (field if is_required or null in field.get("anyOf", ()) else {"anyOf": [field, null]})


_STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td{padding:2px 1em 2px 0}"


def page(document: Json) -> str:
    """The document as an HTML page that loads nothing else."""
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>")
            parts.append(_table(operation, document["components"]["schemas"]))
    head = f"<meta charset=utf-8><title>baton</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>baton</h1>{''.join(parts)}</body></html>"


def _table(operation: Json, schemas: Json) -> str:
    rows = [(found["name"], found["in"], "") for found in operation.get("parameters", ())]
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        schema = content["schema"]
        schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
        for variant in schema.get("anyOf", [schema]):
            for name, found in variant["properties"].items():
                is_required = "required" if name in variant.get("required", ()) else ""
                rows.append((name, is_required, found.get("description", "")))
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>" if rows else ""
