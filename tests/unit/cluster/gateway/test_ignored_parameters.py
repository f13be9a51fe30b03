"""With ``unknown_parameters: ignore``, an answer names what was left out of its request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.gateway.gateway import create_app
from cluster.gateway.generation_endpoint import IGNORED_HEADER
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, TEXT, FakeAdmin, FakeGenerator, say

TOKENIZER = byte_level_tokenizer()
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    generator = FakeGenerator(TOKENIZER, say(TOKENIZER, TEXT))
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(ignores_unknown=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def post(http: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**CHAT, **changes})


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_parameters_are_left_out_and_named(http: httpx.AsyncClient, stream: bool) -> None:
    answer = await post(http, made_up=1, verbose={"a": [2]}, stream=stream)
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "made_up, verbose")
    assert IGNORED_HEADER not in (await post(http, stream=stream)).headers


async def test_names_that_a_header_cannot_hold_are_changed(http: httpx.AsyncClient) -> None:
    answer = await post(http, **{"a\r\nb": 1, "ü,": 2, "x" * 100: 3})
    assert answer.headers[IGNORED_HEADER] == f"a??b, ??, {'x' * 64}"
    many = await post(http, **dict.fromkeys(map("p{}".format, range(20)), 1))
    assert many.headers[IGNORED_HEADER].split(", ") == [f"p{index}" for index in range(16)]


@pytest.mark.parametrize("changes", [{"use_beam_search": True}, {"prompt": "a"}, {"stream_options": {"odd": 1}}])
async def test_known_parameters_and_keys_of_objects_are_refused_all_the_same(
    http: httpx.AsyncClient, changes: dict[str, Any]
) -> None:
    answer = await post(http, made_up=1, **changes)
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (400, "made_up")
    assert answer.json()["error"]["param"] in (*changes, "stream_options.odd")
