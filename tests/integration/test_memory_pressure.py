"""No memory for an allocation that grows with a request: the request ends with an error, or the worker ends and is
replaced. Nothing hangs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import baton.kv_transfer.receiver
import baton.kv_transfer.sender
import decode_worker.server
import prefill_worker.server
from baton.core.errors import BatonError, OutOfMemoryError, WorkerLostError
from baton.engine.async_engine import AsyncEngine
from tests.engine_runs import greedy
from tests.integration.worker_pair import Runners, WorkerPair, pair_config, worker_pair
from tests.tiny_models import random_prompts, tiny_model

[PROMPT] = random_prompts((40,))
NO_MEMORY: dict[str, Exception] = {
    "python": MemoryError(),
    "torch": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)"
    ),
}
Place = Callable[[WorkerPair], tuple[Any, str]]
IN_STEPS: dict[str, Place] = {
    "the prompt's batch": lambda pair: (pair.prefill.engine.runner, "build_batch"),
    "the prompt's forward": lambda pair: (pair.prefill.engine.runner, "forward"),
    "a token's batch": lambda pair: (pair.decode.engine.runner, "build_batch"),
    "a token's forward": lambda pair: (pair.decode.engine.runner, "forward"),
    "a token's choice": lambda pair: (pair.decode.engine._engine.verifier, "verify"),
}
OUTSIDE: dict[str, Place] = {
    "the prompt's message": lambda pair: (prefill_worker.server, "unpack_sequence"),
    "leases": lambda pair: (pair.prefill.role._exporter, "_lease_new_range"),
    "the offer": lambda pair: (pair.prefill.role._exporter, "_offer"),
    "a part that is read": lambda pair: (pair.prefill.engine.runner.cache, "pieces"),
    "a part that is sent": lambda pair: (baton.kv_transfer.sender, "pack_part"),
    "a buffer of the transport": lambda pair: (baton.kv_transfer.sender.GrpcSendStream, "buffer"),
    "a frame that arrives": lambda pair: (baton.kv_transfer.receiver, "decode_frame"),
    "blocks for the import": lambda pair: (pair.decode.role._importer, "_try_reserve"),
    "a part's place": lambda pair: (pair.decode.role._importer, "place"),
    "a part's copy": lambda pair: (pair.decode.engine.runner.cache, "import_bytes"),
    "the commit": lambda pair: (pair.decode.role._importer, "_remember"),
    "the claim": lambda pair: (pair.decode.role._importer, "claim"),
    "taking over": lambda pair: (pair.decode.role._importer, "hand_over"),
    "the request's message": lambda pair: (decode_worker.server, "unpack_sequence"),
    "the answer's message": lambda pair: (decode_worker.server, "pack_output"),
}
IN_THE_LOOP: dict[str, Place] = {
    "the plan of a prompt": lambda pair: (pair.prefill.engine.scheduler, "schedule"),
    "the plan of a token": lambda pair: (pair.decode.engine.scheduler, "schedule"),
    "delivery": lambda pair: (pair.decode.engine._engine, "step"),
}


@pytest.fixture(scope="module")
def runners() -> Runners:
    return Runners.of(tiny_model("llama"))


def fail_times(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], error: Exception, times: int) -> list[None]:
    """Makes the next calls of a function fail. Returns a list of those that have."""
    owner, name = place
    works, failed = getattr(owner, name), list[None]()

    def fail_or_work(*arguments: Any, **options: Any) -> Any:
        if len(failed) < times:
            failed.append(None)
            raise error
        return works(*arguments, **options)

    monkeypatch.setattr(owner, name, fail_or_work)
    return failed


@pytest.mark.parametrize("error", NO_MEMORY.values(), ids=NO_MEMORY.keys())
@pytest.mark.parametrize("place", IN_STEPS.values(), ids=IN_STEPS.keys())
async def test_a_step_is_retried_once(
    runners: Runners, place: Place, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_pair(runners) as pair:
        expected = (await pair.generate(PROMPT, greedy(8))).token_ids
        for times in (1, 2):
            with monkeypatch.context() as patch:
                failed = fail_times(patch, place(pair), error, times)
                if times == 1:
                    assert (await pair.generate(PROMPT, greedy(8))).token_ids == expected
                else:
                    with pytest.raises(OutOfMemoryError, match="no memory for this request"):
                        await pair.generate(PROMPT, greedy(8))
                assert len(failed) == times
        await pair.settle()
        assert (await pair.generate(PROMPT, greedy(8))).token_ids == expected


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("place", OUTSIDE.values(), ids=OUTSIDE.keys())
async def test_a_request_ends_and_the_next_one_is_served(
    runners: Runners, place: Place, shared_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pair_config(kv_transfer={"claim_timeout_s": 2.0, "shared_memory": shared_memory})
    async with worker_pair(runners, config) as pair:
        with monkeypatch.context() as patch:
            failed = fail_times(patch, place(pair), MemoryError(), 1)
            try:
                await pair.generate(PROMPT, greedy(8))
            except BatonError:
                assert failed
        await pair.settle()
        assert len((await pair.generate(PROMPT, greedy(8))).token_ids) == 8
        await pair.settle()


@pytest.mark.parametrize("place", IN_THE_LOOP.values(), ids=IN_THE_LOOP.keys())
async def test_a_worker_whose_engine_fails_ends_and_is_replaced(
    runners: Runners, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_pair(runners) as pair:
        owner, name = place(pair)
        fail_times(monkeypatch, (owner, name), MemoryError(), 1)
        with pytest.raises(WorkerLostError):
            await pair.generate(PROMPT, greedy(8))
        engines: list[AsyncEngine] = [pair.prefill.engine, pair.decode.engine]
        assert [engine.closed.is_set() for engine in engines].count(True) == 1
