"""Request bodies are bounded one by one and together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request

from baton.core.errors import BatonError
from cluster.gateway import bodies as module
from cluster.gateway.bodies import BodyReader
from cluster.gateway.http_edge import JsonResponse, error_response
from cluster.gateway.turns import ByteBudget, Turns, in_passes
from tests.waiting import TIMEOUT_S

MAX_BYTES = 1000
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app, bodies = FastAPI(), BodyReader(MAX_BYTES)

    @app.exception_handler(BatonError)
    async def on_error(_: Request, error: BatonError):
        return error_response(error)

    @app.post("/")
    async def read(request: Request):
        return JsonResponse(await bodies.read_object(request))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=JSON) as client:
        yield client


def body_in_parts(size: int, held: asyncio.Event) -> AsyncIterator[bytes]:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"a":"' + b"x" * (size - 8)
        await held.wait()
        yield b'"}'

    return parts()


async def test_unfinished_bodies_are_bounded_together(http: httpx.AsyncClient) -> None:
    held = asyncio.Event()
    posts = [asyncio.create_task(http.post("/", content=body_in_parts(MAX_BYTES, held))) for _ in range(16)]
    for _ in range(20):
        await asyncio.sleep(0)
    refused = await http.post("/", json={"a": "x" * 200})
    assert refused.status_code == 503
    assert refused.json()["error"]["reason"] == "bytes"
    assert refused.headers["retry-after"] == "1"
    assert (await http.post("/", content=b"{}" + b" " * 2000)).status_code == 413  # holds nothing while it is dropped
    held.set()
    assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 16
    assert (await http.post("/", json={"a": "x" * 200})).status_code == 200


async def test_a_byte_order_mark_is_no_part_of_the_body(http: httpx.AsyncClient) -> None:
    answer = await http.post("/", content=b'\xef\xbb\xbf{"prompt": "a"}')
    assert (answer.status_code, answer.json()) == (200, {"prompt": "a"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\uD83Dx", "\ufffdx"),
        (r"\ude00", "\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\\ud83d \\\ud83d \u0041", "\\ud83d \\\ufffd A"),
    ],
)
async def test_half_a_character_is_replaced(http: httpx.AsyncClient, text: str, expected: str) -> None:
    answer = await http.post("/", content=f'{{"{text}": ["{text}"]}}'.encode())
    assert (answer.status_code, answer.json()) == (200, {expected: [expected]})


@pytest.mark.parametrize("text", [r"\ud83", r"\u00g0 \ud83d", "\0 \\ud83d", r"\ud83d\x"])
async def test_a_broken_escape_is_refused(http: httpx.AsyncClient, text: str) -> None:
    answer = await http.post("/", content=f'{{"a": "{text}"}}'.encode())
    assert answer.status_code == 400
    assert "is not valid JSON" in answer.json()["error"]["message"]


def test_a_budget_is_given_back() -> None:
    budget = ByteBudget(10)
    with budget.share() as share:
        assert share.grow(10)
        assert not share.grow(1)
    assert budget.take(10)


async def test_few_requests_begin_in_one_pass_and_all_in_order() -> None:
    turns, begun, per_pass = Turns(per_pass=2), [], []
    for number in range(7):
        turns.take(lambda number=number: begun.append(number))
    while len(begun) < 7:
        per_pass.append(len(begun))
        await asyncio.sleep(0)
    assert begun == list(range(7))
    assert per_pass == [2, 4, 6]
    await asyncio.sleep(0)
    turns.take(lambda: begun.append(7))
    assert begun[-1] == 7


async def test_a_turn_that_nobody_waits_for_is_passed_on() -> None:
    turns = Turns(per_pass=1)
    await turns.wait()
    left, stays = asyncio.create_task(turns.wait()), asyncio.create_task(turns.wait())
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait_for(stays, TIMEOUT_S)


async def test_items_are_taken_a_few_in_each_pass() -> None:
    passes, ended = [0], asyncio.Event()

    async def count() -> None:
        while not ended.is_set():
            passes[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await in_passes(lambda item: (item, passes[0]), range(5), per_pass=2) == [
        (0, 0), (1, 0), (2, 1), (3, 1), (4, 2),
    ]  # fmt: skip
    ended.set()
    await counting


async def test_large_bodies_are_parsed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    def parse(*_: object) -> dict[str, object]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return {}

    monkeypatch.setattr(module, "parse_object", parse)
    reader = BodyReader(2**20)

    async def read() -> object:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b" " * 2**15, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        return await reader.read_object(Request({"type": "http", "headers": headers}, receive))

    await asyncio.gather(*(read() for _ in range(8)))
    assert most == 1
