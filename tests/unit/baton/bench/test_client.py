"""The client on valid, malformed and empty streams."""

import asyncio
import time

import aiohttp
import pytest
from aiohttp import web

from baton.bench.client import LoadClient
from baton.bench.endpoint import CHAT, COMPLETIONS, Endpoint, RequestSpec
from baton.bench.sample import UNFINISHED, Sample
from baton.bench.stages import Bounds, Stage
from baton.core.request_ids import is_warmup
from tests.reference_server import MODEL, Schedule
from tests.serving_reference import run_against, serving

SPEC = RequestSpec("one two three", 3, 6)
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def one_request() -> Stage:
    return Stage(0, Bounds(requests=1, grace_s=5), concurrency=1)


async def ask(*writes: bytes, status: int = 200, timeout_s: float = 10.0, hang: bool = False) -> Sample:
    """The sample of one request to a server that writes just this."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for data in writes:
            await response.write(data)
        if hang:
            await asyncio.sleep(3600)
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    sample = Sample(0.0, False, 3, 6)
    async with serving(application) as url, LoadClient(Endpoint(url, "m"), timeout_s) as client:
        await client.send(SPEC, sample, time.perf_counter())
    return sample


@pytest.mark.parametrize("warms_up", [True, False])
async def test_warm_up_requests_are_marked(warms_up):
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("X-Request-Id", ""))
        return web.Response(body=TEXT + DONE)

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    async with serving(application) as url, LoadClient(Endpoint(url, "m"), 10.0) as client:
        await client.send(SPEC, Sample(0.0, warms_up, 3, 6), time.perf_counter())
    assert [is_warmup(request_id) for request_id in seen] == [warms_up]


async def test_a_server_without_request_ids_is_fine():
    sample = await ask(TEXT, DONE)
    assert sample.is_ok
    assert sample.to_dict()["request_id"] is None


@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
async def test_counts_come_from_usage_and_times_from_chunks(kind):
    run, server = await run_against(Schedule(0.0, 0.0, tokens_per_chunk=4), one_request(), SPEC, kind=kind)
    (sample,) = run.samples
    assert sample.is_ok
    assert (sample.input_tokens, sample.output_tokens) == (3, 6)
    assert len(sample.chunk_times_s) == 2  # four tokens and two
    assert not sample.counts_are_chunks
    (body,) = server.bodies
    assert body["max_tokens"] == body["min_tokens"] == 6
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) == (kind == CHAT)


async def test_chunks_are_counted_without_usage():
    run, _ = await run_against(Schedule(0.0, 0.0, tokens_per_chunk=4, reports_usage=False), one_request(), SPEC)
    (sample,) = run.samples
    assert sample.is_ok
    assert sample.counts_are_chunks
    assert sample.output_tokens == 2
    assert sample.input_tokens is None


def test_tpot_is_per_token_and_gaps_are_per_chunk():
    sample = Sample(1.0, False, 3, 9, sent_s=1.5, finished_s=4.5, output_tokens=9, error=None)
    sample.chunk_times_s.extend([2.0, 3.0, 4.0])
    assert sample.ttft_s(from_send=False) == 1.0
    assert sample.ttft_s(from_send=True) == 0.5
    assert sample.e2e_s(from_send=False) == 3.5
    assert sample.tpot_s() == 0.25
    assert sample.gaps_s() == [1.0, 1.0]
    sample.output_tokens = 1
    assert sample.tpot_s() is None


async def test_roles_and_finish_chunks_are_not_tokens():
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    word = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    sample = await ask(role, word, end, DONE)
    assert sample.is_ok
    assert len(sample.chunk_times_s) == 1


async def test_tokens_without_text_count():
    sample = await ask(
        b'data: {"choices": [{"text": ""}]}\n\n', b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n', DONE
    )
    assert sample.is_ok
    assert sample.output_tokens == 1


@pytest.mark.parametrize(
    ("writes", "status", "kind", "message"),
    [
        ((b'{"error": "busy"}',), 429, "http_429", "busy"),
        ((b'{"error": {"code": "invalid", "message": "no such tier"}}',), 400, "http_400", "no such tier"),
        ((b'{"detail": "not so"}',), 400, "http_400", '{"detail": "not so"}'),
        ((b"oops",), 500, "http_500", "oops"),
        ((TEXT, b'data: {"error": {"code": "worker_lost", "message": "gone"}}\n\n'), 200, "stream_worker_lost", "gone"),
        ((TEXT,), 200, "truncated", "[DONE]"),
        ((DONE,), 200, "empty", "no tokens"),
        ((b"data: nonsense\n\n",), 200, "malformed", "nonsense"),
        ((b"data: [1]\n\n",), 200, "malformed", "not a JSON object"),
        ((b"caf\xe9",), 500, "http_500", "caf"),
        ((b'data: {"choices": 5}\n\n', DONE), 200, "malformed", "choices"),
        ((b'data: {"choices": ["a"]}\n\n', DONE), 200, "malformed", "choices"),
        ((b'data: {"choices": [{"delta": "a"}]}\n\n', DONE), 200, "malformed", "choices"),
        ((TEXT, b'data: {"usage": "many"}\n\n', DONE), 200, "malformed", "usage"),
        ((TEXT, b'data: {"usage": {"completion_tokens": "many"}}\n\n', DONE), 200, "malformed", "usage"),
        ((TEXT, b'data: {"usage": {"prompt_tokens": [3]}}\n\n', DONE), 200, "malformed", "usage"),
        ((TEXT, b'data: {"usage": {"prompt_tokens_details": 3}}\n\n', DONE), 200, "malformed", "usage"),
        ((TEXT, b'data: {"usage": {"completion_tokens": -1}}\n\n', DONE), 200, "malformed", "usage"),
    ],
)
async def test_failures_are_classified(writes, status, kind, message):
    sample = await ask(*writes, status=status)
    assert sample.error == kind
    assert sample.error_message == message if kind.startswith("http_4") else message in sample.error_message
    assert sample.finished_s is not None


async def test_a_hanging_server_is_a_timeout():
    sample = await ask(TEXT, timeout_s=0.05, hang=True)
    assert sample.error == "timeout"
    assert len(sample.chunk_times_s) <= 1


async def test_a_refused_connection_is_a_connect_failure():
    async with serving(web.Application()) as url:
        pass
    sample = Sample(0.0, False, 3, 6)
    async with LoadClient(Endpoint(url, "m"), 5.0) as client:
        await client.send(SPEC, sample, time.perf_counter())
    assert sample.error == "connect"


async def test_a_slow_connection_is_a_connect_failure(monkeypatch):
    def post(*arguments, **options):
        raise aiohttp.ConnectionTimeoutError("Connection timeout to host http://127.0.0.1")

    monkeypatch.setattr(aiohttp.ClientSession, "post", post)
    sample = Sample(0.0, False, 3, 6)
    async with LoadClient(Endpoint("http://127.0.0.1", "m"), 5.0) as client:
        await client.send(SPEC, sample, time.perf_counter())
    assert (sample.error, sample.error_message) == ("connect", "Connection timeout to host http://127.0.0.1")


async def test_cancelled_requests_stay_unfinished():
    sample = Sample(0.0, False, 3, 6)
    schedule = Schedule(ttft_s=3600)
    run, _ = await run_against(schedule, Stage(0, Bounds(requests=1, seconds=0.01, grace_s=0.05), concurrency=1), SPEC)
    (sample,) = run.samples
    assert sample.error == UNFINISHED
    assert sample.finished_s is None


def test_the_key_is_sent_and_never_displayed():
    endpoint = Endpoint("http://127.0.0.1/v1", MODEL, api_key="secret")
    assert endpoint.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(endpoint)
