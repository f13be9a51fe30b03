"""Limits of API keys: token buckets with their own clock, and the gateway's answers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigError, OverloadedError, RateLimitError
from cluster.config.config import BatonConfig
from cluster.gateway.access import KeyLimiter, TokenBucket
from cluster.gateway.api_keys import ApiKey, ApiKeyConfig, ApiKeys, KeyLimits
from cluster.gateway.gateway import create_app
from cluster.gateway.http_edge import error_response
from cluster.gateway.openai.plan import GatewayLimits
from cluster.requests.generation import GenerationRequest
from tests.fake_clock import FakeClock
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import MODEL, FakeAdmin, FakeGenerator, Step, say
from tests.waiting import until

TOKENIZER = byte_level_tokenizer()
COMPLETION = {"model": MODEL, "prompt": [1, 2, 3, 4, 5], "max_tokens": 4}
COMPLETIONS = "/v1/completions"
KEY, OTHER = "key-of-the-website", "key-of-the-crawler"


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40))
def test_a_bucket_never_exceeds_its_rate(per_minute: int, steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0
    for passed_s, amount in steps:
        now_s += passed_s
        if bucket.seconds_until(amount, now_s) == 0 and amount <= per_minute:
            bucket.take(amount, now_s)
            taken += amount
        assert bucket.level(now_s) <= per_minute
    assert taken <= per_minute * (1 + now_s / 60) + 1e-6


def test_requests_per_minute_refill_one_by_one() -> None:
    clock = FakeClock()
    limiter, key = KeyLimiter(clock), ApiKey("web", limits=KeyLimits(requests_per_minute=6))
    for _ in range(6):
        assert limiter.admit(key) is not None
    with pytest.raises(RateLimitError) as raised:
        limiter.admit(key)
    assert raised.value.reason == "requests"
    assert raised.value.retry_after_s == pytest.approx(10)
    assert raised.value.headers == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now_s += 10.1
    assert limiter.admit(key) is not None
    with pytest.raises(RateLimitError):
        limiter.admit(key)


def test_answer_tokens_are_charged_when_they_are_generated() -> None:
    clock = FakeClock()
    limiter, key = KeyLimiter(clock), ApiKey("web", limits=KeyLimits(tokens_per_minute=60))
    first = limiter.admit(key)
    assert first is not None
    first.take_prompt(20)
    assert first.headers["x-ratelimit-remaining-tokens"] == "40"
    first.settle(70)  # 30 more than there were
    with pytest.raises(RateLimitError) as raised:
        limiter.admit(key)
    assert raised.value.reason == "tokens"
    assert raised.value.retry_after_s == pytest.approx(31)
    clock.now_s += 32
    second = limiter.admit(key)
    assert second is not None
    with pytest.raises(RateLimitError, match="the prompt has 50"):
        second.take_prompt(50)


def test_message_and_header_state_the_same_wait() -> None:
    """A request comes back after 60 / 44 = 1.36 s, and a retry after one second is refused again."""
    limiter, key = KeyLimiter(FakeClock()), ApiKey("web", limits=KeyLimits(requests_per_minute=44))
    for _ in range(44):
        limiter.admit(key)
    with pytest.raises(RateLimitError, match=r"Try again in 2 s") as raised:
        limiter.admit(key)
    assert error_response(raised.value).headers["retry-after"] == "2"


def test_a_prompt_without_an_answer_costs_nothing() -> None:
    limiter, key = KeyLimiter(FakeClock()), ApiKey("web", limits=KeyLimits(tokens_per_minute=60))
    allowance = limiter.admit(key)
    assert allowance is not None
    allowance.take_prompt(50)
    allowance.settle(0)
    assert allowance.headers["x-ratelimit-remaining-tokens"] == "60"


def test_a_prompt_larger_than_the_limit_per_minute_needs_the_full_bucket() -> None:
    clock = FakeClock()
    limiter, key = KeyLimiter(clock), ApiKey("web", limits=KeyLimits(tokens_per_minute=60))
    allowance = limiter.admit(key)
    assert allowance is not None
    allowance.take_prompt(600)
    with pytest.raises(RateLimitError) as raised:
        limiter.admit(key)
    assert raised.value.retry_after_s == pytest.approx(541)


def test_concurrency_counts_running_requests() -> None:
    limiter, key = KeyLimiter(FakeClock()), ApiKey("web", limits=KeyLimits(max_concurrent=2))
    first, second = limiter.admit(key), limiter.admit(key)
    assert first is not None
    assert second is not None
    with pytest.raises(RateLimitError) as raised:
        limiter.admit(key)
    assert raised.value.reason == "concurrency"
    first.release()
    first.release()
    assert limiter.admit(key) is not None
    with pytest.raises(RateLimitError):
        limiter.admit(key)
    assert limiter.admit(ApiKey("other", limits=KeyLimits(max_concurrent=1))) is not None
    assert limiter.admit(ApiKey("free")) is None
    assert limiter.admit(None) is None


def test_changed_limits_count_what_was_used() -> None:
    now_s = [0.0]
    limiter = KeyLimiter(lambda: now_s[0])
    small, large = (ApiKey("web", limits=KeyLimits(requests_per_minute=limit)) for limit in (2, 10))
    for _ in range(2):
        assert limiter.admit(small) is not None
    with pytest.raises(RateLimitError):
        limiter.admit(large)  # nothing is left, and it fills faster
    now_s[0] = 6.0
    assert limiter.admit(large) is not None
    now_s[0] = 600.0
    assert limiter.admit(large) is not None
    assert limiter.admit(small) is not None
    running = ApiKey("jobs", limits=KeyLimits(max_concurrent=2))
    first = limiter.admit(running)
    fewer = ApiKey("jobs", limits=KeyLimits(max_concurrent=1))
    with pytest.raises(RateLimitError):
        limiter.admit(fewer)  # the running request counts
    assert first is not None
    first.release()
    assert limiter.admit(fewer) is not None


@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_limits_are_whole_numbers_above_zero(value: object) -> None:
    with pytest.raises(ConfigError, match=r"router\.api_keys\.0\.requests_per_minute"):
        BatonConfig.from_dict({"router": {"api_keys": [{"name": "web", "key": KEY, "requests_per_minute": value}]}})


def client_of(generator: FakeGenerator, **limits: int) -> httpx.AsyncClient:
    keys = ApiKeys(
        ApiKeyConfig.model_validate(values)
        for values in ({"name": "website", "key": KEY, **limits}, {"name": "crawler", "key": OTHER})
    )
    app = create_app(generator, TOKENIZER, FakeAdmin(), GatewayLimits(), api_keys=keys)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway", headers={"Authorization": f"Bearer {KEY}"}
    )


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, say(TOKENIZER, "hello"))


async def test_the_gateway_answers_429_in_the_format_of_openai(generator: FakeGenerator) -> None:
    async with client_of(generator, requests_per_minute=1, tokens_per_minute=1000) as http:
        good = await http.post(COMPLETIONS, json=COMPLETION)
        assert good.status_code == 200
        assert good.headers["x-ratelimit-limit-requests"] == "1"
        assert good.headers["x-ratelimit-remaining-requests"] == "0"
        assert good.headers["x-ratelimit-remaining-tokens"] == "995"
        refused = await http.post(COMPLETIONS, json=COMPLETION)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["reason"]) == (
            "rate_limit_error",
            "rate_limit_exceeded",
            "requests",
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-remaining-tokens" in refused.headers
        other = await http.post(COMPLETIONS, json=COMPLETION, headers={"Authorization": f"Bearer {OTHER}"})
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers


async def test_a_refused_request_does_no_work(generator: FakeGenerator) -> None:
    async with client_of(generator, requests_per_minute=1) as http:
        await http.post(COMPLETIONS, json=COMPLETION)
        refused = await http.post(COMPLETIONS, json={**COMPLETION, "temperature": "hot"})
    assert refused.status_code == 429  # before it was even looked at
    assert len(generator.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_concurrency_slot_is_freed_when_the_answer_is_complete(generator: FakeGenerator, stream: bool) -> None:
    async with client_of(generator, max_concurrent=1) as http:
        for _ in range(3):
            assert (await http.post(COMPLETIONS, json={**COMPLETION, "stream": stream})).status_code == 200


async def test_a_concurrency_slot_is_held_while_the_request_runs(generator: FakeGenerator) -> None:
    def hang(request: GenerationRequest) -> list[Step]:
        return [None]

    generator.script = hang
    async with client_of(generator, max_concurrent=1) as http:
        running = asyncio.create_task(http.post(COMPLETIONS, json=COMPLETION))
        await until(lambda: len(generator.requests) == 1)
        refused = await http.post(COMPLETIONS, json=COMPLETION)
        assert refused.status_code == 429
        assert refused.json()["error"]["reason"] == "concurrency"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_request_refused_by_the_cluster_gets_its_tokens_back(generator: FakeGenerator) -> None:
    generator.script = lambda request: [
        OverloadedError("No room.", retry_after_s=2.0, reason="prefill", predicted_wait_s=3.25)
    ]
    async with client_of(generator, tokens_per_minute=8) as http:
        for _ in range(3):
            refused = await http.post(COMPLETIONS, json=COMPLETION)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "2"
            assert refused.json()["error"] == {
                "message": "No room.",
                "type": "rate_limit_error",
                "param": None,
                "code": "overloaded",
                "reason": "prefill",
                "predicted_wait_ms": 3250,
            }
