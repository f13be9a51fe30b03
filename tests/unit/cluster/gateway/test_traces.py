"""Traces of speculation: in the answers of every API and in timelines, if the request asks for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from baton.core.request import FinishReason
from baton.core.rounds import MAX_ROUNDS, Round
from baton.explain.timelines import TimelineStore
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import MAX_TRACED_SEQUENCES, GatewayLimits
from cluster.requests.generation import TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, Step, serve
from tests.waiting import TIMEOUT_S

TOKENIZER = byte_level_tokenizer()
A, B, C, D = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcd")
TRACE = {"speculation": {"trace": True}}
HELLO = [{"role": "user", "content": "hello"}]
ROUNDS = [
    Round((A,), verify_s=0.002),
    Round((B, C), "eagle3", (B, D, D), (-1, 0, -1), (0,), 0.001, 0.0125, 2),
    Round((D,), "suffix", (D, A), (-1, 0), (0, 1), 0.0, 0.01),
]
EXPECTED = {
    "rounds": [
        {
            "method": None,
            "draft": {"token_ids": [], "parents": [], "accepted": [], "texts": []},
            "output": {"token_ids": [A], "verdicts": ["plain"], "texts": ["a"]},
            "draft_ms": 0.0,
            "verify_ms": 2.0,
            "batch_sequences": 1,
        },
        {
            "method": "eagle3",
            "draft": {
                "token_ids": [B, D, D],
                "parents": [-1, 0, -1],
                "accepted": [True, False, False],
                "texts": ["b", "d", "d"],
            },
            "output": {"token_ids": [B, C], "verdicts": ["accepted", "recovered"], "texts": ["b", "c"]},
            "draft_ms": 1.0,
            "verify_ms": 12.5,
            "batch_sequences": 2,
        },
        {
            "method": "suffix",
            "draft": {"token_ids": [D, A], "parents": [-1, 0], "accepted": [True, True], "texts": ["d", "a"]},
            "output": {"token_ids": [D], "verdicts": ["accepted"], "texts": ["d"]},
            "draft_ms": 0.0,
            "verify_ms": 10.0,
            "batch_sequences": 1,
        },
    ],
    "left_out": 0,
}


def chunks_of(rounds: Sequence[Round], *, is_traced: bool) -> list[Step]:
    ends = [None] * (len(rounds) - 1) + [FinishReason.LENGTH]
    return [
        TokenChunk(one.token_ids, finish_reason=end, round=one if is_traced else None)
        for one, end in zip(rounds, ends, strict=True)
    ]


class Timelines(FakeAdmin):
    """Serves the timelines of a generator's requests."""

    def __init__(self, generator: FakeGenerator) -> None:
        super().__init__()
        self._generator = generator

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        store = TimelineStore(100)
        for request in self._generator.requests:
            store.add(request.timeline)
        return store.find(request_id)


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, lambda request: chunks_of(ROUNDS, is_traced=request.is_traced))


@pytest.fixture
async def http(generator: FakeGenerator) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, TOKENIZER, Timelines(generator), GatewayLimits())
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The answer, or the events of a stream."""
    answer = await http.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_every_choice_of_an_answer_has_its_trace(http: httpx.AsyncClient, path: str) -> None:
    prompt = {"prompt": "hello"} if path == "completions" else {"messages": HELLO}
    [answer] = await ask(http, path, **prompt, **TRACE, n=2)
    assert [choice["speculation"] for choice in answer["choices"]] == [EXPECTED, EXPECTED]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_the_last_chunk_of_a_stream_has_the_trace(http: httpx.AsyncClient, path: str) -> None:
    prompt = {"prompt": "hello"} if path == "completions" else {"messages": HELLO}
    *others, last = await ask(http, path, **prompt, **TRACE, stream=True)
    assert last["choices"][0]["speculation"] == EXPECTED
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("speculation" in chunk["choices"][0] for chunk in others)


async def test_a_response_has_the_trace(http: httpx.AsyncClient) -> None:
    [answer] = await ask(http, "responses", input="hello", **TRACE)
    assert answer["speculation"] == EXPECTED
    *others, last = await ask(http, "responses", input="hello", **TRACE, stream=True)
    assert last["response"]["speculation"] == EXPECTED
    assert not any("speculation" in event.get("response", {}) for event in others)


async def test_a_message_has_the_trace(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "max_tokens": 9, **TRACE}
    [answer] = await ask(http, "messages", **body)
    assert answer["speculation"] == EXPECTED
    events = await ask(http, "messages", **body, stream=True)
    assert [event["speculation"] for event in events if "speculation" in event] == [EXPECTED]


@pytest.mark.parametrize("body", [{}, {"speculation": {"method": "none"}}, {"speculation": {"trace": False}}])
async def test_without_a_trace_nothing_tells_of_rounds(
    http: httpx.AsyncClient, generator: FakeGenerator, body: dict[str, Any]
) -> None:
    [answer] = await ask(http, "completions", prompt="hello", **body)
    assert "speculation" not in answer["choices"][0]
    [request] = generator.requests
    assert not request.is_traced
    assert "speculation" not in (await http.get(f"/v1/requests/{answer['id']}/timeline")).json()


async def test_the_timeline_has_the_trace_with_texts(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    [answer] = await ask(http, "completions", prompt="hello", n=2, **TRACE)
    timeline = (await http.get(f"/v1/requests/{answer['id']}/timeline")).json()
    assert [sequence["speculation"] for sequence in timeline["sequences"]] == [EXPECTED, EXPECTED]
    kept = generator.requests[0].timeline.to_dict()["speculation"]
    assert "texts" not in str(kept), "the router keeps token ids only"


async def test_tokens_behind_a_stop_string_are_in_no_round(http: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "stop": "b", "return_token_ids": True, **TRACE}
    [answer] = await ask(http, "completions", **body)
    [choice] = answer["choices"]
    rounds = choice["speculation"]["rounds"]
    assert [token for one in rounds for token in one["output"]["token_ids"]] == choice["token_ids"] == [A, B]
    assert rounds[-1]["draft"]["token_ids"] == [B, D, D]


async def test_rounds_beyond_the_limit_are_counted(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = lambda request: chunks_of([Round((A,))] * (MAX_ROUNDS + 3), is_traced=True)
    [answer] = await ask(http, "completions", prompt="hello", **TRACE)
    trace = answer["choices"][0]["speculation"]
    assert (len(trace["rounds"]), trace["left_out"]) == (MAX_ROUNDS, 3)


async def test_a_trace_of_too_many_sequences_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "hello", "n": MAX_TRACED_SEQUENCES + 1, **TRACE})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "speculation"
    assert f"at most {MAX_TRACED_SEQUENCES} sequences" in error["message"]


async def test_a_trace_is_true_or_false(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "hello", "speculation": {"trace": "yes"}})
    assert answer.status_code == 400
    assert "speculation.trace must be a boolean" in answer.json()["error"]["message"]
