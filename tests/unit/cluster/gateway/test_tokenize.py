"""Tokens without generation, in vLLM's form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import ALIAS, CONTEXT_LENGTH, FakeAdmin, say
from tests.unit.cluster.gateway.formats.chat_templates import QWEN
from tests.unit.cluster.gateway.formats.tool_tokenizers import SPECIAL, marked_tokenizer
from tests.unit.cluster.gateway.test_openapi import checked
from tests.unit.cluster.gateway.test_tool_calls import Generator

TOKENIZER = byte_level_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "hello world"}, TOKENIZER.encode("hello world")),
        ({"prompt": "", "model": ALIAS}, TOKENIZER.encode("")),
        ({"messages": HELLO}, TOKENIZER.apply_chat_template(HELLO)),
        (
            {"messages": HELLO, "add_generation_prompt": False},
            TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=False),
        ),
        (
            {"messages": HELLO, "continue_final_message": True},
            TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=False, continue_final_message=True),
        ),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": None},
            TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=False, continue_final_message=True),
        ),
    ],
)
async def test_texts_and_chats_are_tokenized(
    http: httpx.AsyncClient, body: dict[str, Any], expected: list[int]
) -> None:
    answer = (await http.post("/tokenize", json=body)).json()
    checked(answer, "Tokens")
    assert answer == {
        "count": len(expected), "max_model_len": CONTEXT_LENGTH, "tokens": expected, "token_strs": None
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_a_message_is_begun_or_continued(http: httpx.AsyncClient, path: str) -> None:
    both = {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}
    answer = await http.post(path, json=both)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "continue_final_message")
    assert error["message"] == "add_generation_prompt and continue_final_message cannot both be true."


async def test_tokens_have_their_text_and_may_be_more_than_the_context(http: httpx.AsyncClient) -> None:
    text = "hello world. " * 200
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] > CONTEXT_LENGTH
    assert "".join(answer["token_strs"]) == text
    back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    checked(back, "Text")
    assert back == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "made_up": 1}, "made_up"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "tools": 5}, "tools"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/tokenize", {"messages": HELLO, "tools": [TOOL] * 1025}, "tools"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_wrong_requests_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": HELLO, "prompt": "a"}, "prompt", "prompt and messages exclude each other; send one of them."),
        ({}, "prompt", "There is neither prompt nor messages; send one of them."),
        ({"prompt": None}, "prompt", "There is neither prompt nor messages; send one of them."),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "tools belongs to messages; leave it out beside prompt."),
        (
            {"prompt": "a", "chat_template_kwargs": {}},
            "chat_template_kwargs",
            "chat_template_kwargs belongs to messages; leave it out beside prompt.",
        ),
    ],
)
async def test_what_does_not_go_together_is_named(
    http: httpx.AsyncClient, body: dict[str, Any], param: str, message: str
) -> None:
    answer = await http.post("/tokenize", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, message)


async def test_null_is_absent(http: httpx.AsyncClient) -> None:
    for body in ({"prompt": "a", "messages": None, "tools": None}, {"prompt": None, "messages": HELLO}):
        assert (await http.post("/tokenize", json=body)).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
        {"tools": []},
    ],
)
@pytest.mark.parametrize("template", [QWEN, None])
async def test_a_chat_has_the_tokens_of_its_prompt(template: str | None, settings: dict[str, Any]) -> None:
    tokenizer = marked_tokenizer(("<tool_call>", "</tool_call>"), SPECIAL, template)
    generator = Generator(tokenizer, say(tokenizer, "Ok."))
    app = create_app(generator, tokenizer, FakeAdmin(), GatewayLimits())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.post("/tokenize", json={"messages": HELLO, **settings})
        await http.post("/v1/chat/completions", json={"messages": HELLO, **settings})
    assert answer.json()["tokens"] == list(generator.requests[0].prompt_token_ids)
    assert ("get_weather" in tokenizer.decode(answer.json()["tokens"])) == bool(settings.get("tools"))


async def test_without_a_tool_parser_tools_are_refused_as_in_chats() -> None:
    tokenizer = byte_level_tokenizer()
    app = create_app(
        Generator(tokenizer, say(tokenizer, "Ok.")),
        tokenizer,
        FakeAdmin(),
        GatewayLimits(),
        dialect=Dialect(tokenizer, "none"),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.post("/tokenize", json={"messages": HELLO, "tools": [TOOL]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "router.tool_parser is none" in answer.json()["error"]["message"]


async def test_an_unknown_model_has_no_tokens(http: httpx.AsyncClient) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": []}),
    ):
        assert (await http.post(path, json={**body, "model": "other"})).status_code == 404


async def test_the_version_is_told(http: httpx.AsyncClient) -> None:
    answer = await http.get("/version")
    checked(answer.json(), "Version")
