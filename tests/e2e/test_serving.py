"""A running cluster through the OpenAI client: completions, errors, hand-offs, load and idleness."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.tokenizer import Tokenizer
from tests.bad_inputs import BadInput, bad_inputs
from tests.e2e.conftest import EXACT
from tests.e2e.prompt_logprobs import PromptLogprobs
from tests.e2e.translated_apis import MessagesApi, ResponsesApi
from tests.running_cluster import MODEL, RunningCluster

# float32, so that tokens can be compared exactly whatever they are batched with
SETTINGS = EXACT
CONTEXT_LENGTH = 8192
# layers, key and value, KV heads, head dim, float32; then the draft head's one layer
SMOLLM2_KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4 + 1 * 2 * 9 * 64 * 4
TOLD_S = 30.0
SCALED_S = 240.0


class Sailor(BaseModel):
    name: str = Field(max_length=20)
    age: int
    rank: Literal["captain", "cook"]
    ports: list[Annotated[str, Field(max_length=12)]] = Field(max_length=3)


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + TOLD_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(ensure_default_model()))


@pytest.fixture(scope="module")
def client(cluster: RunningCluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0)


class TestOpenAIClient:
    def test_chat_completions_work(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=20,
            temperature=0,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_streamed_and_whole_answers_are_equal(self, client: OpenAI) -> None:
        def ask(**options: Any) -> Any:
            return client.completions.create(
                model=MODEL, prompt="Three colours are", max_tokens=24, temperature=0.9, seed=7, **options
            )

        whole = ask().choices[0].text
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 24

    def test_structured_answers_are_parsed(self, client: OpenAI) -> None:
        for options in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
            answer = client.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": "Invent a sailor."}],
                max_tokens=200,
                response_format=Sailor,
                **options,
            )
            sailor = answer.choices[0].message.parsed
            assert sailor is not None
            assert sailor.rank in ("captain", "cook")
            assert answer.choices[0].finish_reason == "stop"

    def test_tools_and_their_results_reach_a_model_whose_template_has_none(
        self, client: OpenAI, tokenizer: Tokenizer
    ) -> None:
        tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
        call: Any = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": "What is the weather in Oslo?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "It is snowing in Oslo."},
            ],
            tools=[tool], max_tokens=40, temperature=0,
        )  # fmt: skip
        assert "snow" in (answer.choices[0].message.content or "")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > len(tokenizer.encode(str(tool)))

    def test_required_calls_are_valid(self, client: OpenAI) -> None:
        """Of a small model, which has hardly seen a tool."""
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        }
        tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
        question: Any = {"role": "user", "content": "What will the weather be in Oslo?"}
        ask: Any = {"model": MODEL, "messages": [question], "tools": [tool], "max_tokens": 100, "temperature": 0}
        whole = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0]
        assert whole.finish_reason == "tool_calls"
        [call] = whole.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), schema)
        named = {"type": "function", "function": {"name": "get_weather"}}
        with client.chat.completions.stream(**ask, tool_choice=named) as stream:
            for _ in stream:
                pass
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments

    def test_choices_logprobs_and_stop_strings_work(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from one to ten in words."}],
            n=3, max_tokens=40, temperature=0.8, seed=3, logprobs=True, top_logprobs=2, stop=["five", "Five"],
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert "five" not in (choice.message.content or "").lower()
            assert choice.logprobs is not None
            assert all(len(entry.top_logprobs) >= 2 for entry in choice.logprobs.content or [])
        assert len({choice.message.content for choice in answer.choices}) > 1

    def test_models_are_listed(self, client: OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]


class TestPromptLogprobs(PromptLogprobs):
    """Its tests in this module's cluster."""


class TestResponsesApi(ResponsesApi):
    """Its tests in this module's cluster."""


class TestMessagesApi(MessagesApi):
    """Its tests in this module's cluster."""


@pytest.mark.parametrize("bad", bad_inputs(MODEL, CONTEXT_LENGTH), ids=lambda bad: bad.name)
def test_bad_input_is_refused_with_a_clear_error(cluster: RunningCluster, bad: BadInput) -> None:
    response = httpx.request(
        bad.method, cluster.endpoint + bad.path, content=bad.content, headers=bad.headers, timeout=60
    )
    assert response.status_code == bad.status, response.text
    error = response.json()["error"]
    assert error["code"] == bad.code
    assert error["param"] == bad.param
    assert bad.fragment in error["message"]


def test_bad_input_does_not_affect_other_requests(cluster: RunningCluster) -> None:
    """A request that generates while all bad inputs arrive gets the same answer as alone."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.endpoint, timeout=120) as http:

            async def good() -> list[int]:
                body = {"model": MODEL, "prompt": "The story begins", "max_tokens": 60, "temperature": 0}
                answer = await http.post("/v1/completions", json={**body, "return_token_ids": True, "ignore_eos": True})
                tokens: list[int] = answer.json()["choices"][0]["token_ids"]
                return tokens

            quiet = await good()
            running = asyncio.create_task(good())
            for bad in bad_inputs(MODEL, CONTEXT_LENGTH):
                await http.request(bad.method, bad.path, content=bad.content, headers=bad.headers)
            assert await running == quiet
            assert len(quiet) == 60

    asyncio.run(run())
    cluster.assert_nothing_leaked()


def test_kv_bytes_over_grpc_match_the_layout(cluster: RunningCluster, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("A text that nobody has sent before: " + " ".join(str(n * 37) for n in range(120)))
    names = ("baton_kv_transfer_bytes_total", "baton_kv_transfers_total", "baton_kv_transfer_saved_tokens_total")

    def send(tokens: list[int]) -> list[float]:
        before = [cluster.metric(name) for name in names]
        cluster.complete(tokens, max_tokens=4, ignore_eos=True)
        cluster.assert_nothing_leaked()  # a hand-off may be booked behind the answer
        return [cluster.metric(name) - start for name, start in zip(names, before, strict=True)]

    assert send(prompt) == [len(prompt) * SMOLLM2_KV_BYTES_PER_TOKEN, 1, 0]
    # The decode worker still holds the full blocks of prompt and output, so only the rest is sent.
    seconds = cluster.metric("baton_kv_transfer_seconds_sum")
    saved = len(prompt) // 16 * 16
    assert send(prompt) == [(len(prompt) - saved) * SMOLLM2_KV_BYTES_PER_TOKEN, 1, saved]
    assert cluster.metric("baton_kv_transfer_seconds_sum") > seconds


def test_a_single_token_needs_no_handoff(cluster: RunningCluster) -> None:
    before = cluster.metric("baton_kv_transfers_total")
    body = cluster.complete("Just one token, please", max_tokens=1)
    assert body["usage"]["completion_tokens"] == 1
    cluster.assert_nothing_leaked()
    assert cluster.metric("baton_kv_transfers_total") == before


def test_the_timeline_has_every_stage_in_order(cluster: RunningCluster) -> None:
    body = cluster.complete("Tell me about rivers and the sea.", max_tokens=8, ignore_eos=True)
    cluster.assert_nothing_leaked()  # what the hand-off tells may come behind the answer
    timeline = cluster.get(f"/v1/requests/{body['id']}/timeline")
    at_ms = {event["name"]: event["at_ms"] for event in timeline["events"]}
    order = [
        "received",
        "tokenized",
        "routed",
        "prefill_queued",
        "prefill_started",
        "first_token_sampled",
        "first_token",
    ]
    assert [name for name in at_ms if name in order] == order
    assert at_ms["prefill_started"] <= at_ms["transfer_started"] <= at_ms["kv_committed"] <= at_ms["decode_queued"]
    assert at_ms["second_token"] <= at_ms["finished"]
    assert {span["name"] for span in timeline["spans"]} >= {
        "queue",
        "tokenize",
        "prefill",
        "transfer",
        "first_token",
        "decode",
    }
    assert timeline["attributes"]["output_tokens"] == 8


def test_a_disconnect_cancels_the_work_on_both_workers(cluster: RunningCluster) -> None:
    before = cluster.metric("baton_requests_total")
    body = {
        "model": MODEL,
        "prompt": "Write a very long story.",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{cluster.endpoint}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert sum(worker["in_flight"] for worker in cluster.workers("decode")) == 1
    with pytest.raises(httpx.TimeoutException):  # a client that does not stream and loses patience
        httpx.post(f"{cluster.endpoint}/v1/completions", json={**body, "stream": False}, timeout=3.0)
    cluster.assert_nothing_leaked()
    eventually(lambda: cluster.metric("baton_requests_in_flight") == 0)
    eventually(lambda: cluster.metric("baton_requests_total") == before + 2)


def test_two_hundred_requests_complete_while_pools_scale(cluster: RunningCluster, thorough: bool) -> None:
    """No token is lost or duplicated, and no block leaks, even while both pools grow and shrink."""
    sizes = ((2, 2), (1, 2), (2, 1), (1, 1)) if thorough else ((2, 2), (1, 1))
    longest, later_wave = (16, 40) if thorough else (8, 4)  # starting processes need the cores

    async def run(num_requests: int, *, scale: bool) -> list[list[int]]:
        """The tokens of the first so many requests."""
        openai = AsyncOpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=300)
        gate = asyncio.Semaphore(32)

        async def one(number: int) -> tuple[int, list[int], list[str]]:
            num_tokens = 1 + number * 7 % longest
            async with gate:
                stream = await openai.completions.create(
                    model=MODEL,
                    prompt=f"Item {number}. " + "It is a long way to the sea. " * (number % 9),
                    max_tokens=num_tokens,
                    stream=True,
                    temperature=0,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                tokens: list[int] = []
                finishes: list[str] = []
                async for chunk in stream:
                    for choice in chunk.choices:
                        tokens += choice.model_extra["token_ids"] if choice.model_extra else []
                        finishes += [choice.finish_reason] if choice.finish_reason else []
            return num_tokens, tokens, finishes

        async def scale_up_and_down() -> None:
            async with httpx.AsyncClient(base_url=cluster.endpoint, timeout=60) as http:
                for prefill, decode in sizes:
                    targets = {"prefill": prefill, "decode": decode}
                    command = [
                        sys.executable,
                        "-m",
                        "cluster.cli.cli",
                        "scale",
                        "--no-wait",
                        "--endpoint",
                        cluster.endpoint,
                    ]
                    process = await asyncio.create_subprocess_exec(*command, *(f"{k}={v}" for k, v in targets.items()))
                    assert await process.wait() == 0
                    deadline = time.monotonic() + SCALED_S
                    while time.monotonic() < deadline:
                        pools = (await http.get("/admin/status")).json()["pools"]
                        ready = {
                            name: sum(w["state"] == "ready" for w in pool["workers"]) for name, pool in pools.items()
                        }
                        if ready == targets:
                            break
                        await asyncio.sleep(0.25)
                    assert ready == targets

        scaling = asyncio.create_task(scale_up_and_down()) if scale else None
        number, first = 0, None
        while number < num_requests or (scaling is not None and not scaling.done() and number < 20_000):
            wave = range(number, number + (later_wave if first else num_requests))
            results = await asyncio.gather(*(one(n) for n in wave))
            assert [(want, len(got)) for want, got, _ in results if want != len(got)] == []
            assert all(finishes == ["length"] for _, _, finishes in results)
            first = first or [tokens for _, tokens, _ in results]
            number += len(results)
        if scaling is not None:
            await scaling
        await openai.close()
        return first or []

    steady = asyncio.run(run(200 if thorough else 24, scale=False))
    cluster.assert_nothing_leaked()
    assert asyncio.run(run(200, scale=True))[: len(steady)] == steady
    cluster.assert_nothing_leaked()
    eventually(lambda: len(cluster.workers("prefill")) == len(cluster.workers("decode")) == 1)
    eventually(lambda: cluster.metric("baton_requests_in_flight") == 0)


def test_idle_workers_use_no_cpu(cluster: RunningCluster) -> None:
    cluster.complete("Wake up once", max_tokens=4)
    cluster.assert_nothing_leaked()
    time.sleep(1)
    processes = [psutil.Process(worker["pid"]) for worker in cluster.workers()]

    def used_s() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    def shares_of(seconds: float) -> list[float]:
        before = used_s()
        time.sleep(seconds)
        return [(now - start) / seconds for now, start in zip(used_s(), before, strict=True)]

    # A garbage collection or the like may fall into a window, but not into each of them. A thread that waits in a loop
    # would take a whole core; timers, probes and Ray's threads take 0.01 to 0.1 of one, depending on the machine.
    windows = [shares_of(5.0)]
    while max(windows[-1]) >= 0.3 and len(windows) < 4:
        windows.append(shares_of(5.0))
    assert max(windows[-1]) < 0.3, windows
