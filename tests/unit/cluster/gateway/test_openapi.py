"""The description of the API matches what is served."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute

from cluster.gateway.anthropic.schemas import MessagesRequest, PromptRequest
from cluster.gateway.endpoints import ENDPOINTS
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest
from cluster.gateway.openapi import describe_api
from cluster.gateway.responses.schemas import ResponsesRequest
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, say

TOKENIZER = byte_level_tokenizer()
DOCUMENT = describe_api()
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
COMPLETION = {"prompt": ["hello", "you"], "max_tokens": 8}


def checked(answer: Any, name: str) -> None:
    jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    ).validate(answer)


def test_every_route_is_described_and_served() -> None:
    app = create_app(FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")), TOKENIZER, FakeAdmin(), GatewayLimits())
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    served = {(method, re.sub(r"\{.*?\}", "{}", route.path)) for route in routes for method in route.methods}
    listed = {(endpoint.method, re.sub(r"\{.*?\}", "{}", endpoint.path)) for endpoint in ENDPOINTS}
    assert served == listed
    described = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {endpoint.name for endpoint in ENDPOINTS}


def test_every_parameter_is_described_with_its_values() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for schema in (ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, PromptRequest):
        properties = schemas[schema.__name__]["properties"]
        assert {name: found["description"] for name, found in properties.items()} == {
            name: parameter.note for name, parameter in schema.parameters.items()
        }
    checked({**CHAT, "stop": ["a"], "logit_bias": {"5": 1}, "user": None, "tools": []}, "ChatCompletionRequest")
    checked({"input": [{"role": "user", "content": "hello"}], "store": None}, "ResponsesRequest")
    checked({**CHAT, "system": [{"type": "text", "text": "a"}]}, "MessagesRequest")
    for wrong in ({"messages": []}, {**CHAT, "made_up": 1}, {**CHAT, "store": True}, {**CHAT, "n": "2"}):
        with pytest.raises(jsonschema.ValidationError):
            checked(wrong, "ChatCompletionRequest")


async def test_answers_are_as_described(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == DOCUMENT
    asking = {"logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}
    for changes in ({}, asking, {**asking, "echo": True}):
        checked((await http.post("/v1/completions", json={**COMPLETION, **changes})).json(), "Completion")
    for changes in ({}, {**asking, "logprobs": True, "top_logprobs": 2, "service_tier": "auto"}):
        checked((await http.post("/v1/chat/completions", json={**CHAT, **changes})).json(), "ChatCompletion")
    for changes in ({}, {"max_output_tokens": 3, "instructions": "a", "service_tier": "auto", "metadata": {"a": "b"}}):
        checked((await http.post("/v1/responses", json={"input": "hello", **changes})).json(), "Response")
    for changes in ({}, {"max_tokens": 3}, {"stop_sequences": ["i"]}):
        checked((await http.post("/v1/messages", json={**CHAT, **changes})).json(), "Message")
    checked((await http.post("/v1/messages/count_tokens", json={"messages": CHAT["messages"]})).json(), "TokenCount")
    checked((await http.post("/v1/messages", json={})).json(), "AnthropicError")
    models = (await http.get("/v1/models")).json()
    checked(models, "ModelList")
    assert models["slo_classes"] == ["interactive", "standard", "batch"]
    checked((await http.get("/v1/speculation")).json(), "MethodList")
    checked((await http.get(f"/v1/models/{MODEL}")).json(), "Model")
    checked((await http.post("/v1/chat/completions", json={})).json(), "Error")


async def test_the_page_is_complete_and_loads_nothing(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for endpoint in ENDPOINTS:
        assert f"<h2>{endpoint.name}</h2>" in answer.text
    assert "repetition_penalty" in answer.text
    assert not re.search(r"<script|<link|https?:", answer.text)
