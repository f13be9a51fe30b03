"""The page of the HTTP API, from the document that ``/openapi.json`` serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.gateway.openapi import describe_api
from tests.reference_pages.markdown import code, plain, table

Json = Mapping[str, Any]

_PARAMETERS = {
    "/v1/completions": "../parameters.md",
    "/v1/chat/completions": "../parameters.md",
    "/v1/responses": "../parameters.md#v1responses",
    "/v1/messages": "../parameters.md#v1messages",
    "/v1/messages/count_tokens": "../parameters.md#v1messages",
}
_KINDS = {"application/json": "JSON", "text/plain": "text", "text/html": "a page", "application/octet-stream": "bytes"}
_HEAD = """# HTTP

Every endpoint of the router. A running router serves the whole description, with the types of all fields, as
`GET /openapi.json`, and as a page at `GET /docs`. [The HTTP API](../api.md) says how they behave,
[keys](../api.md#api-keys) who may call them, and [its table of errors](../api.md#usage) what they answer otherwise.

This page is generated: `python -m tests.reference_pages`.
"""


def _names(schema: Json, schemas: Json) -> list[str]:
    """The names of the fields of a schema, in order."""
    if "$ref" in schema:
        return _names(schemas[str(schema["$ref"]).rpartition("/")[2]], schemas)
    found = list(schema.get("properties", ()))
    for part in schema.get("anyOf", ()):
        found += [name for name in _names(part, schemas) if name not in found]
    return found


def _takes(path: str, operation: Json, schemas: Json) -> str:
    queries = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    parts = [f"query {', '.join(map(code, queries))}"] if queries else []
    if path in _PARAMETERS:
        parts.append(f"[parameters]({_PARAMETERS[path]})")
    elif body := operation.get("requestBody"):
        [(kind, content)] = body["content"].items()
        form = "form" if kind.startswith("multipart") else "JSON"
        parts.append(f"{form} {', '.join(map(code, _names(content['schema'], schemas)))}")
    return "; ".join(parts)


def _gives(operation: Json) -> str:
    parts = []
    for kind, content in operation["responses"]["200"]["content"].items():
        name = str(content["schema"].get("$ref", "")).rpartition("/")[2]
        if kind == "text/event-stream":
            parts.append("or a stream of events")
        else:
            parts.append(f"[{name}](#answers)" if name and name != "Object" else _KINDS.get(kind, kind))
    return " ".join(parts)


def render() -> str:
    """The text of the page."""
    document = describe_api()
    schemas: Json = document["components"]["schemas"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    rows = [
        (code(f"{method} {path}"), plain(operation["summary"]), _takes(path, operation, schemas), _gives(operation))
        for method, path, operation in operations
    ]
    answers = {
        str(content["schema"]["$ref"]).rpartition("/")[2]
        for *_, operation in operations
        for content in operation["responses"]["200"]["content"].values()
        if "$ref" in content["schema"]
    }
    fields = [
        (code(name), ", ".join(map(code, _names(schema, schemas))))
        for name, schema in schemas.items()
        if name in answers and name != "Object"
    ]
    answer_table = f"## Answers\n\n{table(['', 'fields'], fields)}"
    return "\n".join([_HEAD, table(["endpoint", "", "takes", "answers"], rows), answer_table])
