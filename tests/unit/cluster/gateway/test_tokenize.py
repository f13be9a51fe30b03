"""Tokens without generation, in vLLM's form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import ALIAS, CONTEXT_LENGTH
from tests.unit.cluster.gateway.test_openapi import checked

TOKENIZER = byte_level_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]


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
        ("/tokenize", {"messages": HELLO, "prompt": "a"}, "prompt"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_wrong_requests_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
