"""Clients that disconnect at any moment leave nothing behind on either worker and affect no other request."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

import pytest
from transformers import PreTrainedModel

from baton.core.errors import BatonError, WorkerLostError
from baton.rpc.wire import worker_pb2
from tests.credentials import CREDENTIALS, send_to
from tests.engine_runs import greedy
from tests.integration.worker_pair import Answer, HostedWorker, Runners, WorkerPair, pair_config, worker_pair
from tests.observers import CallOn
from tests.tiny_models import model_with_reference, random_prompts
from tests.waiting import TIMEOUT_S

PROMPTS = random_prompts((5, 18, 37, 64, 90))
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def reference() -> tuple[PreTrainedModel, list[list[int]]]:
    return model_with_reference("llama", PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def runners(reference: tuple[PreTrainedModel, list[list[int]]]) -> Runners:
    return Runners.of(reference[0], num_blocks=160)


@pytest.fixture(scope="module")
def expected(reference: tuple[PreTrainedModel, list[list[int]]]) -> list[list[int]]:
    return reference[1]


@pytest.mark.parametrize("seed", range(10))
async def test_cancelling_at_random_moments_leaks_nothing(
    runners: Runners, expected: list[list[int]], seed: int
) -> None:
    """24 requests: most leave at a random moment, on the prefill or the decode stream; the others must not notice."""
    chance = random.Random(seed)
    config = pair_config(
        prefill={"chunk_tokens": 16},
        kv_transfer={"part_bytes": 4096, "max_bytes_per_second": chance.choice((None, 400_000.0))},
    )
    async with worker_pair(runners, config) as pair:

        async def one() -> None:
            index = chance.randrange(len(PROMPTS))
            await asyncio.sleep(chance.random() * 0.2)
            task = asyncio.create_task(pair.generate(PROMPTS[index], greedy(NUM_TOKENS)))
            if chance.random() < 0.7:
                await asyncio.sleep(chance.random() * 0.4)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert (await task).token_ids == expected[index]

        await asyncio.gather(*(one() for _ in range(24)))
        await pair.settle()
        assert (await pair.generate(PROMPTS[0], greedy(NUM_TOKENS))).token_ids == expected[0]
        await pair.settle()


async def test_cancelling_during_the_transfer_leaks_nothing(runners: Runners) -> None:
    config = pair_config(kv_transfer={"max_bytes_per_second": 5_000.0})
    async with worker_pair(runners, config) as pair:
        message = pair.prefill_request("request", PROMPTS[4], greedy(8))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            await anext(stream)
            assert (await pair.prefill.client.stats()).num_transfers == 1
        await pair.settle()


async def test_kv_of_a_finished_request_is_freed_at_once(runners: Runners) -> None:
    """Unclaimed KV would stay for ``kv_transfer.claim_timeout_s``, which is longer than this test waits."""
    async with worker_pair(runners, pair_config(kv_transfer={"claim_timeout_s": 600.0})) as pair:
        message = pair.prefill_request("request", PROMPTS[4], greedy(8))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            assert [event.WhichOneof("kind") async for event in stream] == ["first_token", "handoff"]
        assert (await pair.decode.client.stats()).num_transfers == 1
        await pair.decode.client.abandon(message.handoff.transfer_id)
        await pair.settle()


async def claimed(pair: WorkerPair, transfer_id: str) -> None:
    """Waits until a request on the decode worker waits for its KV."""
    imports = pair.decode.role._importer._imports
    async with asyncio.timeout(TIMEOUT_S):
        while (entry := imports.get(transfer_id)) is None or not entry.claimed:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_prefill_can_be_cancelled_while_decode_waits_for_kv(runners: Runners) -> None:
    config = pair_config(kv_transfer={"max_bytes_per_second": 5_000.0})
    async with worker_pair(runners, config) as pair:
        message = pair.prefill_request("request", PROMPTS[4], greedy(8))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            first = (await anext(stream)).first_token
            decoding = asyncio.create_task(
                pair.continue_from(
                    Answer(token_ids=list(first.token_ids)),
                    "request",
                    PROMPTS[4],
                    greedy(8),
                    message.handoff.transfer_id,
                )
            )
            await claimed(pair, message.handoff.transfer_id)
        with pytest.raises(BatonError, match="The KV transfer failed"):
            await asyncio.wait_for(decoding, TIMEOUT_S)
        await pair.settle()


async def test_decode_can_be_cancelled_while_prefill_is_sending(runners: Runners) -> None:
    config = pair_config(kv_transfer={"max_bytes_per_second": 5_000.0})
    async with worker_pair(runners, config) as pair:
        message = pair.prefill_request("request", PROMPTS[4], greedy(8))
        async with aclosing(pair.prefill.client.prefill(message, TIMEOUT_S)) as stream:
            first = (await anext(stream)).first_token
            decoding = asyncio.create_task(
                pair.continue_from(
                    Answer(token_ids=list(first.token_ids)),
                    "request",
                    PROMPTS[4],
                    greedy(8),
                    message.handoff.transfer_id,
                )
            )
            await claimed(pair, message.handoff.transfer_id)
            decoding.cancel()
            last = await anext(stream)
        assert last.handoff.error_code == "kv_transfer_failed"
        await pair.settle()


def slow_down(worker: HostedWorker) -> None:
    """Slows steps down; otherwise so small a model would finish before the test can cancel."""
    worker.engine.subscribe(CallOn(scheduled=lambda plan: time.sleep(0.01)))


async def test_stopping_a_decode_worker_ends_its_streams_with_a_lost_worker_error(runners: Runners) -> None:
    async with worker_pair(runners) as pair:
        slow_down(pair.decode)
        running = asyncio.create_task(pair.continue_from(Answer(), "request", PROMPTS[0], greedy(150)))
        await asyncio.sleep(0.05)
        await pair.decode.server.stop(grace=0)
        with pytest.raises(WorkerLostError):
            await running


@pytest.mark.parametrize("worker", ["prefill", "decode"])
async def test_stopping_an_engine_ends_its_streams_with_a_lost_worker_error(runners: Runners, worker: str) -> None:
    config = pair_config(prefill={"chunk_tokens": 1, "max_num_seqs": 1})
    async with worker_pair(runners, config) as pair:
        stopped = getattr(pair, worker)
        slow_down(stopped)
        if worker == "prefill":
            running = asyncio.create_task(pair.generate(PROMPTS[4], greedy(150)))
        else:
            running = asyncio.create_task(pair.continue_from(Answer(), "request", PROMPTS[0], greedy(150)))
        await asyncio.sleep(0.05)
        await stopped.role.stop()
        with pytest.raises(WorkerLostError, match="shutting down"):
            await asyncio.wait_for(running, TIMEOUT_S)


@pytest.mark.parametrize("seed", range(3))
async def test_random_messages_to_worker_ports_are_harmless(
    runners: Runners, expected: list[list[int]], seed: int
) -> None:
    chance = random.Random(seed)
    async with worker_pair(runners, pair_config(kv_transfer={"claim_timeout_s": 2.0})) as pair:
        honest = asyncio.create_task(pair.generate_all(PROMPTS, greedy(NUM_TOKENS)))
        await asyncio.gather(*(_send_random_messages(pair, chance) for _ in range(60)))
        assert await honest == expected
        await pair.settle()
        assert await pair.generate_all(PROMPTS, greedy(NUM_TOKENS)) == expected
        await pair.settle()


async def _send_random_messages(pair: WorkerPair, chance: random.Random) -> None:
    """One call with a message that is random bytes, a damaged request, or a request about another sender's transfer."""
    is_prefill = chance.random() < 0.5
    path = "/baton.v1.Prefill/Prefill" if is_prefill else "/baton.v1.Decode/Generate"
    worker = pair.prefill if is_prefill else pair.decode
    call = worker.client._connection._channel.unary_stream(path)(
        _hostile_message(pair, chance, is_prefill), timeout=5.0, metadata=CREDENTIALS.call_metadata(worker.address)
    )
    try:
        await asyncio.sleep(chance.random() * 0.1)
        async for _ in call:
            if chance.random() < 0.2:
                return
    except Exception:  # noqa: BLE001 - any answer will do, as long as the worker lives on
        return
    finally:
        call.cancel()


def _hostile_message(pair: WorkerPair, chance: random.Random, is_prefill: bool) -> bytes:
    prompt = [chance.randrange(0, 170) for _ in range(chance.randint(0, 60))]
    request_id = chance.choice(("", "same", "request-1", "🎭" * 1000))
    params = worker_pb2.SamplingParams(
        max_tokens=chance.choice((0, 1, 5, 2**32 - 1)),
        temperature=chance.choice((0.0, 1.0, float("nan"), -1.0)),
        top_p=1.0,
        repetition_penalty=chance.choice((0.0, 1.0, 1.2)),
        seed=chance.choice((0, 2**63)),
    )
    sequence = worker_pb2.Sequence(
        request_id=request_id,
        prompt_token_ids=prompt,
        output_token_ids=prompt[: chance.randint(0, 8)],
        params=params,
    )
    if is_prefill:
        whole = worker_pb2.PrefillRequest(sequence=sequence)
        whole.handoff.transfer_id = chance.choice(("", "request-1/1", "request-2/1", "new"))
        send_to(whole.handoff, chance.choice(("", "nonsense", "127.0.0.1:1", "unix:/none", pair.decode.address)))
        data = bytearray(whole.SerializeToString())
    else:
        data = bytearray(
            worker_pb2.GenerateRequest(
                sequence=sequence, transfer_id=chance.choice(("", "", "nobody/1", "new"))
            ).SerializeToString()
        )
    luck = chance.random()
    if luck < 0.2:
        return chance.randbytes(chance.randint(0, 300))
    if luck < 0.4 and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)
