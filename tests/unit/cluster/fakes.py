"""A router, an operator backend and a server that need no cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from baton.core.errors import BatonError, NotFoundError, NoWorkerError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request import FinishReason, TokenLogprobs
from baton.engine.models.tokenizer import Tokenizer
from cluster.requests.generation import GenerationRequest, ModelCard, TokenChunk
from tests.waiting import until

MODEL = "tiny/model"
ALIAS = "gpt-4o"
TEXT = "hello world, the quick brown fox"
CONTEXT_LENGTH = 128

# One step of a fake sequence: a chunk, an exception to raise, or None to wait without end.
Step = TokenChunk | Exception | None
Script = Callable[[GenerationRequest], Sequence[Step]]


def say(tokenizer: Tokenizer, text: str, *, cached: int = 0) -> Script:
    """A script that sends ``text`` token by token, within ``max_tokens``, with fake logprobs if requested."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    def script(request: GenerationRequest) -> list[Step]:
        budget = request.params.max_tokens
        output = [*token_ids, tokenizer.eos_token_id or 0][:budget]
        reason = FinishReason.STOP if len(output) > len(token_ids) else FinishReason.LENGTH
        return [
            TokenChunk(
                token_ids=(token_id,),
                logprobs=_logprobs(request, token_id),
                finish_reason=reason if index == len(output) - 1 else None,
                num_cached_tokens=cached,
                prompt_logprobs=_prompt_logprobs(request) if index == 0 else None,
            )
            for index, token_id in enumerate(output)
        ]

    return script


def _logprobs(request: GenerationRequest, token_id: int) -> tuple[TokenLogprobs, ...] | None:
    wanted = request.params.logprobs
    if wanted is None:
        return None
    top = tuple((token_id + offset, -0.5 - offset) for offset in range(wanted))
    return (TokenLogprobs(-0.5, top),)


def _prompt_logprobs(request: GenerationRequest) -> PromptLogprobs | None:
    num_top = request.params.prompt_logprobs
    return None if num_top is None else PromptLogprobs.of_prompt(len(request.prompt_token_ids), num_top)


@dataclass
class FakeGenerator:
    """Plays ``script`` for every request and remembers what happened to each."""

    tokenizer: Tokenizer
    script: Script
    ready: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    first_chunks: list[str] = field(default_factory=list)
    streams: list[AsyncIterator[TokenChunk]] = field(default_factory=list)
    """Keeps the streams alive, so that the gateway and not garbage collection must close them."""

    @property
    def model(self) -> ModelCard:
        return ModelCard(
            name=MODEL,
            max_model_len=CONTEXT_LENGTH,
            vocab_size=self.tokenizer.vocab_size,
            created_unix_s=1_700_000_000,
            eos_token_ids=frozenset({self.tokenizer.eos_token_id or 0}),
            aliases=(ALIAS,),
        )

    def is_ready(self) -> bool:
        return self.ready

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.streams.append(self._play(request))
        return self.streams[-1]

    async def _play(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        if not self.ready:
            raise NoWorkerError("No healthy prefill worker.")
        self.requests.append(request)
        finished = False
        try:
            for position, step in enumerate(self.script(request)):
                await asyncio.sleep(0)
                if step is None:
                    await asyncio.Event().wait()
                elif isinstance(step, Exception):
                    finished = True
                    raise step
                else:
                    if position == 0:
                        self.first_chunks.append(request.request_id)
                    finished = step.finish_reason is not None
                    yield step
            self.completed.append(request.request_id)
        finally:
            if not finished:
                self.cancelled.append(request.request_id)


@dataclass
class FakeAdmin:
    """Records its calls."""

    scaled: list[dict[str, int | None]] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)
    error: BatonError | None = None

    async def status(self) -> dict[str, Any]:
        return {"pools": {"prefill": 1, "decode": 1}}

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        self.moved.append((source, destination))
        return {"pools": {}}

    async def plan(self) -> dict[str, Any]:
        return {"enabled": False}

    async def advise(self) -> dict[str, Any]:
        return {"texts": ["Keep it."]}

    async def trace(self) -> list[dict[str, Any]]:
        return [{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [0]}]

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.scaled.append(targets)
        return {"targets": targets}

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        if request_id != "known":
            raise NotFoundError(f"No request {request_id!r} is known.", param="request_id")
        return {"request_id": request_id, "events": []}

    async def requests(self, order: str, limit: int) -> list[dict[str, Any]]:
        return [{"request_id": "known", "order": order}][:limit]

    async def metrics(self) -> bytes:
        return b"# HELP baton_up 1\nbaton_up 1\n"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """Runs ``app`` on a free loopback port and yields its base URL."""
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error"))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
