"""An OpenAI-compatible server with a known schedule, for the validation of load tools:
``python -m tests.reference_server``.

The times of tokens depend only on the arrival of the request, unless all slots are taken or the server stalls. No model
runs; a token is a word.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from aiohttp import web

MODEL = "reference"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The server's schedule.

    Attributes:
        ttft_s: time from arrival to the first token.
        tpot_s: time between tokens.
        tokens_per_chunk: tokens per chunk, as with speculation.
        stall_at_s: when the server stalls, in seconds since the first request; ``None`` means never.
        stall_s: duration of the stall.
        slots: maximum number of concurrent requests, beyond which requests queue; ``None`` means no limit.
        reports_usage: whether the server supports ``stream_options.include_usage``.
        max_model_len: the limit in ``/v1/models``, which is enforced; ``None`` means neither.
        fail_every: every request with this number gets status 503; 0 means none.
    """

    ttft_s: float = 0.05
    tpot_s: float = 0.01
    tokens_per_chunk: int = 1
    stall_at_s: float | None = None
    stall_s: float = 0.0
    slots: int | None = None
    reports_usage: bool = True
    fail_every: int = 0
    max_model_len: int | None = None


class ReferenceServer:
    """The server; ``application`` is an aiohttp application with ``/v1/models`` and both endpoints.

    Attributes:
        bodies: bodies of all requests so far.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.bodies: list[dict[str, object]] = []
        self._schedule = schedule
        self._slots = None if schedule.slots is None else asyncio.Semaphore(schedule.slots)
        self._first_arrival_s: float | None = None
        self.application = web.Application(client_max_size=64 * 2**20)
        self.application.router.add_get("/v1/models", self._models)
        self.application.router.add_post("/v1/completions", self._generate)
        self.application.router.add_post("/v1/chat/completions", self._generate)
        # Other load tools check the server's health.
        self.application.router.add_get("/health", self._models)

    async def _models(self, request: web.Request) -> web.Response:
        model: dict[str, object] = {"id": MODEL, "object": "model"}
        if self._schedule.max_model_len is not None:
            model["max_model_len"] = self._schedule.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.perf_counter()
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        if self._schedule.fail_every and len(self.bodies) % self._schedule.fail_every == 0:
            return web.json_response({"error": {"code": "overloaded", "message": "on purpose"}}, status=503)
        if not body.get("stream"):
            return web.json_response(_whole(body))
        if self._first_arrival_s is None:
            self._first_arrival_s = arrived_s
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Request-Id": f"reference-{len(self.bodies)}"}
        )
        await response.prepare(request)
        if self._slots is None:
            await self._stream(response, body, arrived_s)
        else:
            async with self._slots:
                await self._stream(response, body, time.perf_counter())
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, object], start_s: float) -> None:
        schedule, num_tokens = self._schedule, _num_output_tokens(body)
        for sent in range(0, num_tokens, schedule.tokens_per_chunk):
            await self._until(start_s + schedule.ttft_s + sent * schedule.tpot_s)
            text = "word " * min(schedule.tokens_per_chunk, num_tokens - sent)
            await response.write(_event(_chunk(body, text)))
        if schedule.reports_usage and body.get("stream_options"):
            await response.write(_event({"choices": [], "usage": _usage(body)}))
        await response.write(b"data: [DONE]\n\n")

    async def _until(self, due_s: float) -> None:
        stall_at_s, first_s = self._schedule.stall_at_s, self._first_arrival_s
        if stall_at_s is not None and first_s is not None:
            stall_start_s = first_s + stall_at_s
            stall_end_s = stall_start_s + self._schedule.stall_s
            if stall_start_s <= due_s < stall_end_s:
                due_s = stall_end_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


def _num_prompt_tokens(body: dict[str, object]) -> int:
    messages = body.get("messages")
    texts = [message["content"] for message in messages] if isinstance(messages, list) else [body.get("prompt", "")]
    return sum(len(text.split()) if isinstance(text, str) else 0 for text in texts)


def _num_output_tokens(body: dict[str, object]) -> int:
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    return int(limit) if isinstance(limit, int) else 16


def _usage(body: dict[str, object]) -> dict[str, int]:
    prompt, output = _num_prompt_tokens(body), _num_output_tokens(body)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _chunk(body: dict[str, object], text: str) -> dict[str, object]:
    content = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"id": "reference", "model": MODEL, "choices": [{"index": 0, "finish_reason": None, **content}]}


def _whole(body: dict[str, object]) -> dict[str, object]:
    text = "word " * _num_output_tokens(body)
    content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": "length", **content}], "usage": _usage(body)}


def _event(values: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(values) + b"\n\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves on the loopback interface until it is interrupted."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server with a known schedule.")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--stall-at", type=float, help="seconds since the first request")
    parser.add_argument("--stall", type=float, default=2.0, help="seconds")
    options = parser.parse_args(arguments)
    schedule = Schedule(
        options.ttft_ms / 1000.0, options.tpot_ms / 1000.0, options.tokens_per_chunk, options.stall_at, options.stall,
        options.slots,
    )  # fmt: skip
    web.run_app(ReferenceServer(schedule).application, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
