"""KV that leaves as int8: all of it, rounded once, counted as what travelled; and ``auto``, which goes by the link."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import torch

from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.engine.runner.model_runner import ModelRunner
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.payload.in_process import InProcessKVTransport
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from prefill_worker.encoding_choice import EncodingChoice
from tests.kv_receiver import Receiver, running_receiver
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import kv_server, transport_over
from tests.unit.prefill_worker.test_kv_export import PROMPT, prompt_request, received, sending, true_kv

INT8 = KVEncoding.INT8


@pytest.fixture
async def receiver(receiver_runner: ModelRunner) -> AsyncIterator[Receiver]:
    async with running_receiver(receiver_runner, encodings=(INT8,), prefix_caching=False) as running:
        yield running


def wire_bytes(spec: KVCacheSpec, num_tokens: int, encoding: KVEncoding) -> int:
    return num_tokens * spec.layer_bytes_per_token(0, len(spec.layers), encoding)


def vectors(data: bytes, spec: KVCacheSpec) -> torch.Tensor:
    """Of a layer whose keys and values are of one length."""
    layer = spec.layers[0]
    assert layer.key_dim == layer.value_dim
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, layer.key_dim)


async def test_int8_arrives_within_tolerance_and_counts_its_transferred_bytes(
    runner: ModelRunner, receiver: Receiver
) -> None:
    spec, expected = runner.spec, await true_kv(runner, PROMPT)
    transport = InProcessKVTransport({"receiver": receiver.importer})
    async with sending(runner, transport, choice=EncodingChoice("int8")) as sender:
        summary = await sender.run(prompt_request())
        for got, true in zip(await received(receiver), expected, strict=True):
            found, exact = vectors(got, spec), vectors(true, spec)
            assert ((found - exact).abs() <= exact.abs().amax(-1, keepdim=True) / 253 + 1e-4).all()
            assert not torch.equal(found, exact)
        assert summary.num_bytes == sender.exporter.num_bytes_sent == wire_bytes(spec, len(PROMPT), INT8)
        assert summary.num_bytes == sum(part.num_bytes for part in summary.parts)
        assert summary.num_bytes + summary.num_spared_bytes == wire_bytes(spec, len(PROMPT), KVEncoding.NATIVE)
        await sender.all_given_back()
    await receiver.all_given_back()


async def test_auto_depends_on_the_link(runner: ModelRunner, receiver: Receiver) -> None:
    choice = EncodingChoice("auto")
    transport = transport_over(throttle=Throttle(20_000))
    async with kv_server(receiver.importer, None) as (_, peer):
        async with sending(runner, transport, peer=peer, choice=choice, prefix_caching=False) as sender:
            first = await sender.run(prompt_request())
            await received(receiver)
            assert first.num_spared_bytes == 0, "nothing is known of the link"
            assert choice.link(peer).speed.bytes_per_second == pytest.approx(20_000, rel=0.5)
            choice.prefill.observe(10**9, 1.0)
            slow = await sender.run(prompt_request("second"), "transfer-2")
            await received(receiver, "transfer-2")
            assert slow.num_bytes == wire_bytes(runner.spec, len(PROMPT), INT8)
            choice.prefill.observe(0, 10.0**7)
            fast = await sender.run(prompt_request("third"), "transfer-3")
            assert fast.num_spared_bytes == 0
            await sender.all_given_back()
        await transport.close()


async def test_auto_keeps_native_kv_in_shared_memory(runner: ModelRunner, receiver: Receiver) -> None:
    choice = EncodingChoice("auto")
    transport = transport_over(SharedMemorySendPath(1000), throttle=Throttle(200_000))
    async with kv_server(receiver.importer, SegmentMappings()) as (_, peer):
        choice.prefill.observe(10**9, 1.0)
        choice.link(peer).speed.observe(10, 1.0)
        assert choice.offers(peer) == (INT8,)
        async with sending(runner, transport, peer=peer, choice=choice) as sender:
            summary = await sender.run(prompt_request())
            assert (
                summary.num_shared_bytes == summary.num_bytes == wire_bytes(runner.spec, len(PROMPT), KVEncoding.NATIVE)
            )
            assert summary.num_spared_bytes == 0
            await sender.all_given_back()
        await transport.close()


async def test_prefill_speed_is_measured_by_steps(runner: ModelRunner) -> None:
    choice, num_tokens, began_s = EncodingChoice("auto"), 0, time.monotonic()
    async with sending(runner, InProcessKVTransport({}), choice=choice, prefix_caching=False) as sender:
        while choice.prefill.bytes_per_second is None:
            prompt = random_prompts((60,), seed=num_tokens)[0]
            assert [output async for output in sender.engine.generate(prompt_request(f"{num_tokens}", prompt))]
            num_tokens += len(prompt)
    elapsed_s = time.monotonic() - began_s  # more than what steps took of it
    assert choice.prefill.bytes_per_second > 0.9 * num_tokens * runner.spec.bytes_per_token / elapsed_s
