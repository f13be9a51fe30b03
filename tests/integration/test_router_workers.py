"""The router with workers that behave, over real gRPC connections: tokens, load, limits, cancellation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from baton.core.errors import (
    DeadlineError,
    NoWorkerError,
    OverloadedError,
    TransferError,
)
from baton.core.request import FinishReason
from baton.rpc.wire import worker_pb2
from cluster.registry.progress_judge import Standing
from tests.fake_workers import (
    BYTES_MOVED,
    CACHED_TOKENS,
    FakeCluster,
    batch,
    decode_some,
    die,
    endless,
    expected_tokens,
    failing,
    fresh,
    hang,
    prefill_then,
)
from tests.waiting import TIMEOUT_S, until


@pytest.fixture
async def cluster():
    async with FakeCluster() as fake:
        yield fake


class TestHappyPath:
    async def test_tokens_arrive_once_in_order_with_one_finish(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        chunks = await cluster.chunks()
        assert [token for chunk in chunks for token in chunk.token_ids] == expected_tokens(6)
        assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + [FinishReason.LENGTH]
        assert chunks[0].num_cached_tokens == CACHED_TOKENS
        [sent] = prefill.requests
        assert sent.handoff.peer == decode.address
        assert list(sent.sequence.prompt_token_ids) == [5, 6, 7, 8]
        [claimed] = decode.requests
        assert claimed.transfer_id == sent.handoff.transfer_id != ""
        assert list(claimed.sequence.output_token_ids) == expected_tokens(1)
        await until(lambda: cluster.is_idle)

    async def test_a_request_fills_metrics_and_timeline(self, cluster):
        await cluster.add_all(["p1", "d1"])
        request = cluster.request()
        await cluster.run(request)
        await until(lambda: cluster.is_idle)
        assert cluster.metric("baton_requests_total", outcome="length") == 1
        assert cluster.metric("baton_output_tokens_total") == 6
        assert cluster.metric("baton_prompt_tokens_total") == 4
        assert cluster.metric("baton_cached_prompt_tokens_total") == CACHED_TOKENS
        assert cluster.metric("baton_kv_transfers_total", outcome="ok") == 1
        assert cluster.metric("baton_kv_transfer_bytes_total") == BYTES_MOVED
        assert cluster.metric("baton_time_to_first_token_seconds_count", slo_class="standard") == 1
        assert cluster.metric("baton_requests_in_flight") == 0
        shown = cluster.timelines.to_dict("r")
        assert shown is not None
        assert shown["attributes"]["outcome"] == "length"
        assert shown["attributes"]["kv_bytes"] == BYTES_MOVED
        assert (shown["attributes"]["prefill_worker"], shown["attributes"]["decode_worker"]) == ("p1", "d1")

    @pytest.mark.parametrize("error_s", [0.0, 1.0, -1.0])
    @pytest.mark.parametrize("shift_s", [0.0, 5 * 3600.0, -7 * 3600.0])
    async def test_events_of_workers_with_other_clocks_stay_in_order(self, cluster, shift_s, error_s):
        for worker in (await cluster.add("p1", shift_s), await cluster.add("d1", -2 * shift_s)):
            worker.ping_error_s = error_s  # as of answers that come late on one way only
            await cluster.registry.get(worker.worker_id).sync_clock()
        request = cluster.request()
        await cluster.run(request)
        await until(lambda: cluster.is_idle)
        names = [event["name"] for event in request.timeline.to_dict()["events"] if "transfer" not in event["name"]]
        # The decode worker has the request already when the router reads the first token.
        assert names.index("first_token_sampled") < names.index("first_token") < names.index("second_token")
        assert [name for name in names if name not in ("kv_committed", "first_token")] == [
            "received",
            "tokenized",
            "admitted",
            "routed",
            "prefill_queued",
            "prefill_started",
            "first_token_sampled",
            "decode_queued",
            "decode_started",
            "second_token",
            "finished",
        ]

    async def test_the_first_token_does_not_wait_for_the_handoff(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])
        acknowledged = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: acknowledged.wait(), prefill.handoff_done())]
        async with aclosing(cluster.stream()) as chunks:
            first = await anext(chunks)
            assert list(first.token_ids) == expected_tokens(1)
            assert cluster.metric("baton_kv_transfers_total", outcome="ok") == 0
            acknowledged.set()
            assert [token async for chunk in chunks for token in chunk.token_ids] == expected_tokens(6)[1:]

    async def test_a_single_token_needs_no_decode_worker_and_no_handoff(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        assert await cluster.run(cluster.request(max_tokens=1)) == expected_tokens(1)
        assert not prefill.requests[0].HasField("handoff")
        assert decode.requests == []

    async def test_a_sequence_can_end_with_its_first_token(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])

        async def stop_at_once(worker, request):
            message = batch(request, 0)
            message.finish_reason = "stop"
            yield worker_pb2.PrefillEvent(first_token=message)

        prefill.scripts = [stop_at_once]
        [chunk] = await cluster.chunks()
        assert chunk.finish_reason is FinishReason.STOP
        assert decode.requests == []
        await until(lambda: cluster.is_idle)

    async def test_a_reused_request_id_gets_a_new_id_on_the_workers(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        for _ in range(5):
            async with aclosing(cluster.stream(cluster.request("same"))) as chunks:
                await anext(chunks)
        assert await cluster.run(cluster.request("same")) == expected_tokens(6)
        assert len(set(prefill.call_ids)) == 6
        assert all(call_id.startswith("same/") for call_id in prefill.call_ids)
        await until(lambda: cluster.is_idle)
        assert len(set(decode.call_ids)) == len(decode.call_ids)

    async def test_requests_spread_over_idle_workers(self, cluster):
        workers = await cluster.add_all(["p1", "p2", "p3", "d1", "d2"])
        await asyncio.gather(*(cluster.run(cluster.request(f"r{i}")) for i in range(12)))
        assert [len(worker.requests) for worker in workers] == [4, 4, 4, 6, 6]

    async def test_a_new_request_goes_to_the_least_loaded_worker(self, cluster):
        busy, free, _ = await cluster.add_all(["p1", "p2", "d1"])
        busy.scripts = [hang]
        stuck = asyncio.create_task(cluster.run(cluster.request("stuck")))
        await until(lambda: busy.num_open == 1)
        for index in range(4):
            await cluster.run(cluster.request(f"r{index}"))
            await until(lambda: free.num_open == 0 and cluster.in_flight("p2") == 0)
        assert (len(busy.requests), len(free.requests)) == (1, 4)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


class TestWorkersThatComeAndGo:
    async def test_without_workers_a_request_waits_and_then_fails(self):
        async with fresh(worker_wait_s=0.05) as cluster:
            await cluster.add("p1")
            with pytest.raises(NoWorkerError, match=r"No decode worker .* 0\.05 s"):
                await cluster.run()
            assert cluster.metric("baton_requests_total", outcome="no_worker_available") == 1
            assert cluster.is_idle

    async def test_a_waiting_request_uses_a_worker_that_appears(self, cluster):
        await cluster.add("p1")
        waiting = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await cluster.add("d1")
        assert await waiting == expected_tokens(6)

    async def test_an_empty_pool_reserves_no_worker_of_the_other_pool(self, cluster):
        await cluster.add("d1")
        waiting = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        cluster.registry.drain("d1")
        worker = cluster.registry.get("d1")
        assert worker is not None
        await asyncio.wait_for(worker.idle.wait(), TIMEOUT_S)
        await cluster.registry.remove("d1")
        await cluster.add_all(["p1", "d2"])
        assert await waiting == expected_tokens(6)

    async def test_draining_and_suspect_workers_get_no_new_requests(self, cluster):
        workers = await cluster.add_all(["p1", "p2", "p3", "d1"])
        cluster.registry.drain("p1")
        suspect = cluster.registry.get("p2")
        assert suspect is not None
        cluster.registry.judged("p2", Standing.SUSPECTED, "it has not answered for 3 s")
        for index in range(3):
            await cluster.run(cluster.request(f"r{index}"))
        assert [len(worker.requests) for worker in workers[:3]] == [0, 0, 3]

    async def test_a_lost_worker_becomes_a_suspect(self, cluster):
        bad, _, _ = await cluster.add_all(["p1", "p2", "d1"])
        bad.scripts = [die]
        await cluster.run()
        worker = cluster.registry.get("p1")
        assert worker is not None
        assert not worker.is_accepting
        assert cluster.router.is_ready()

    async def test_draining_waits_for_the_end_of_the_handoff(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])
        acknowledged = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: acknowledged.wait(), prefill.handoff_done())]
        assert await cluster.run() == expected_tokens(6)
        worker = cluster.registry.drain("p1")
        assert worker is not None
        assert cluster.router.num_in_flight == 0
        assert not worker.idle.is_set()
        acknowledged.set()
        await asyncio.wait_for(worker.idle.wait(), TIMEOUT_S)
        assert cluster.metric("baton_kv_transfers_total", outcome="ok") == 1

    async def test_draining_waits_for_requests_on_both_sides(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        go_on = asyncio.Event()
        decode.scripts = [decode_some(2, lambda _: go_on.wait())]
        async with aclosing(cluster.stream(cluster.request(max_tokens=3))) as chunks:
            await anext(chunks)
            worker = cluster.registry.drain("d1")
            assert worker is not None
            assert not worker.idle.is_set()
            go_on.set()
            assert [chunk.token_ids[0] async for chunk in chunks] == expected_tokens(3)[1:]
        assert worker.idle.is_set()
        assert prefill.num_cancelled == 0

    async def test_a_request_is_counted_as_soon_as_it_is_routed(self, cluster):
        """Nothing may happen between the choice of a worker and its assignment, or a drain would overtake it."""
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [hang]
        running = asyncio.create_task(cluster.run())
        await asyncio.sleep(0)
        assert (cluster.in_flight("p1"), cluster.in_flight("d1")) == (1, 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: cluster.is_idle)


class TestLimits:
    async def test_the_deadline_ends_a_hanging_prefill(self):
        async with fresh(request_timeout_s=0.2) as cluster:
            prefill, decode = await cluster.add_all(["p1", "d1"])
            prefill.scripts = [hang]
            with pytest.raises(DeadlineError, match=r"0\.2 s.*router\.request_timeout_s") as raised:
                await cluster.run()
            assert raised.value.http_status == 504
            await until(lambda: cluster.is_idle)
            assert decode.requests == []

    async def test_the_deadline_ends_a_hanging_decode(self):
        async with fresh(request_timeout_s=0.3) as cluster:
            _, decode = await cluster.add_all(["p1", "d1"])
            decode.scripts = [decode_some(2, endless)]
            with pytest.raises(DeadlineError):
                await cluster.run()
            await until(lambda: cluster.is_idle)

    async def test_the_deadline_ends_the_wait_for_workers(self):
        async with fresh(request_timeout_s=0.1, worker_wait_s=60.0) as cluster:
            with pytest.raises(DeadlineError):
                await cluster.run()

    async def test_attempts_share_one_deadline(self):
        async with fresh(request_timeout_s=0.4, max_attempts=1000) as cluster:
            _, decode = await cluster.add_all(["p1", "d1"])

            async def slow_failure(worker, request):
                await asyncio.sleep(0.05)
                raise TransferError("again")
                yield

            decode.scripts = [slow_failure] * 100
            with pytest.raises(DeadlineError) as raised:
                await cluster.run(cluster.request("late"))
            assert cluster.timelines.to_dict("late")["attributes"]["error_message"] == raised.value.message

    async def test_too_many_requests_are_refused(self):
        async with fresh(max_inflight=2) as cluster:
            prefill, _ = await cluster.add_all(["p1", "d1"])
            prefill.scripts = [hang, hang]
            running = [asyncio.create_task(cluster.run(cluster.request(f"r{i}"))) for i in range(2)]
            await until(lambda: prefill.num_open == 2)
            with pytest.raises(OverloadedError, match=r"router\.max_inflight") as raised:
                await cluster.run(cluster.request("one too many"))
            assert raised.value.http_status == 429
            assert raised.value.retry_after_s > 0
            assert cluster.timelines.to_dict("one too many") is None
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            assert await cluster.run(cluster.request("room again")) == expected_tokens(6)


class TestCancellation:
    async def test_cancelling_before_the_first_token_stops_the_work(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [hang]
        running = asyncio.create_task(cluster.run())
        await until(lambda: prefill.num_open == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: cluster.is_idle)
        assert prefill.num_cancelled == 1

    async def test_cancelling_after_the_first_token_stops_the_handoff(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [prefill_then(endless)]
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
        assert (cluster.in_flight("p1"), cluster.in_flight("d1")) == (0, 0)
        await until(lambda: cluster.is_idle)
        assert (prefill.num_cancelled, decode.requests) == (1, [])

    async def test_kv_of_a_cancelled_request_is_abandoned(self, cluster):
        """One case is a request whose stop string is its first token: its KV may be complete and unclaimed."""
        prefill, decode = await cluster.add_all(["p1", "d1"])
        await cluster.run()
        decode.scripts = [decode_some(1, endless)]
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
            await anext(chunks)  # the decode worker has that KV, and notices that its client leaves
        await until(lambda: cluster.is_idle)
        assert decode.abandoned == []
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
        await until(lambda: decode.abandoned)
        assert decode.abandoned == [prefill.requests[-1].handoff.transfer_id]
        await until(lambda: cluster.is_idle)

    async def test_cancelling_stops_both_workers(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [prefill_then(endless)]
        decode.scripts = [hang]
        stream = cluster.stream()
        await anext(stream)
        following = asyncio.ensure_future(anext(stream))
        await until(lambda: decode.num_open == 1)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await stream.aclose()
        assert (cluster.in_flight("p1"), cluster.in_flight("d1")) == (0, 0)
        await until(lambda: cluster.is_idle)
        assert (prefill.num_cancelled, decode.num_cancelled) == (1, 1)
        assert cluster.metric("baton_requests_total", outcome="cancelled") == 1

    @pytest.mark.parametrize("num_chunks", [2, 3, 5])
    async def test_cancelling_in_the_middle_of_the_stream_stops_the_decode_worker(self, cluster, num_chunks):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [decode_some(5, endless)]
        async with aclosing(cluster.stream(cluster.request(max_tokens=50))) as chunks:
            for _ in range(num_chunks):
                await anext(chunks)
        assert cluster.in_flight("d1") == 0
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    async def test_cancelling_while_waiting_for_a_worker_leaves_nothing(self, cluster):
        running = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cluster.is_idle

    async def test_cancelling_a_resumed_request_stops_its_worker(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [failing(TransferError("no")), decode_some(1, endless)]
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
            await anext(chunks)
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    async def test_cancelling_at_any_moment_leaves_nothing(self, cluster):
        """One request after the other, cancelled a little later each time: nothing may stay behind."""
        await cluster.add_all(["p1", "p2", "d1", "d2"])
        for step in range(40):
            running = asyncio.create_task(cluster.run(cluster.request(f"r{step}")))
            await asyncio.sleep(step * 0.003)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await until(lambda: cluster.is_idle)
        assert await cluster.run(cluster.request("afterwards")) == expected_tokens(6)
