"""The router against workers that behave, fail, hang and die, over real gRPC connections."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing

import pytest

from cluster.config import RouterConfig
from cluster.wire import worker_pb2
from engine.errors import (
    ChecksumError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OutOfBlocksError,
    OverloadedError,
    RequestCancelledError,
    TransferError,
    WorkerLostError,
)
from engine.request import FinishReason
from tests.fake_workers import (
    BYTES_MOVED,
    CACHED_TOKENS,
    TIMEOUT_S,
    FakeCluster,
    batch,
    death,
    decode_some,
    die,
    end_at_once,
    expected_tokens,
    failing,
    for_ever,
    good_decode,
    handoff_failed,
    hang,
    hang_telling,
    prefill_then,
)


@pytest.fixture(autouse=True)
async def no_lost_errors():
    """Fails a test that leaves an exception which nobody has looked at."""
    lost: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert lost == []


@pytest.fixture
async def cluster():
    async with FakeCluster() as fake:
        yield fake


async def until(condition) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - the conditions are other tasks' state, without events
            await asyncio.sleep(0.005)


def fresh(**router: object) -> FakeCluster:
    return FakeCluster(RouterConfig(**{"worker_wait_s": 5.0, **router}))


class TestHappyPath:
    async def test_tokens_come_once_in_order_and_with_one_finish(self, cluster):
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

    async def test_metrics_and_timeline(self, cluster):
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
        assert cluster.metric("baton_time_to_first_token_seconds_count") == 1
        assert cluster.metric("baton_requests_in_flight") == 0
        shown = cluster.timelines.to_dict("r")
        assert shown is not None
        assert shown["attributes"]["outcome"] == "length"
        assert shown["attributes"]["kv_bytes"] == BYTES_MOVED
        assert (shown["attributes"]["prefill_worker"], shown["attributes"]["decode_worker"]) == ("p1", "d1")

    @pytest.mark.parametrize("shift_s", [0.0, 5 * 3600.0, -7 * 3600.0])
    async def test_events_of_workers_with_other_clocks_are_in_order(self, cluster, shift_s):
        await cluster.add("p1", clock_shift_s=shift_s)
        await cluster.add("d1", clock_shift_s=-2 * shift_s)
        request = cluster.request()
        await cluster.run(request)
        await until(lambda: cluster.is_idle)
        names = [event["name"] for event in request.timeline.to_dict()["events"] if "transfer" not in event["name"]]
        assert [name for name in names if name != "kv_committed"] == [
            "received",
            "tokenized",
            "routed",
            "prefill_queued",
            "prefill_started",
            "first_token_sampled",
            "first_token",
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

    async def test_one_token_needs_no_decode_worker_and_no_handoff(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        assert await cluster.run(cluster.request(max_tokens=1)) == expected_tokens(1)
        assert not prefill.requests[0].HasField("handoff")
        assert decode.requests == []

    async def test_a_sequence_may_end_with_its_first_token(self, cluster):
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

    async def test_a_reused_request_id_gets_another_name_on_the_workers(self, cluster):
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

    async def test_a_new_request_goes_where_the_least_are(self, cluster):
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


class TestPrefillFailures:
    @pytest.mark.parametrize(
        "script",
        [
            failing(WorkerLostError("gone")),
            failing(OutOfBlocksError("full")),
            failing(RequestCancelledError("the worker is stopping")),
            end_at_once,
            die,
        ],
        ids=["lost", "full", "cancelled_there", "empty", "died"],
    )
    async def test_a_failure_before_the_first_token_goes_to_another_worker(self, cluster, script):
        bad, good, _ = await cluster.add_all(["p1", "p2", "d1"])
        bad.scripts = [script]
        assert await cluster.run() == expected_tokens(6)
        assert (len(bad.requests), len(good.requests)) == (1, 1)
        assert (
            sum(
                cluster.metric("baton_retries_total", reason=reason)
                for reason in ("worker_lost", "out_of_kv_blocks", "request_cancelled")
            )
            == 1
        )
        await until(lambda: cluster.is_idle)

    @pytest.mark.parametrize("after", [(death,), ()], ids=["died", "ended_without_word"])
    async def test_a_prefill_worker_lost_after_the_first_token(self, cluster, after):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), *after)]
        decode.scripts = [hang_telling(claimed)]  # no KV ever comes
        assert await cluster.run() == expected_tokens(6)
        first, second = decode.requests
        assert (first.transfer_id != "", second.transfer_id) == (True, "")
        assert list(second.sequence.output_token_ids) == expected_tokens(1)
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    @pytest.mark.parametrize(
        "error",
        [
            TransferError("broke off"),
            ChecksumError("damaged"),
            OutOfBlocksError("no room"),
            DeadlineError("the transfer took too long"),
            InternalError("something odd"),
            ContextLengthError("too long for this decode worker"),
        ],
        ids=lambda error: error.code,
    )
    async def test_a_failed_handoff_is_made_up_for_by_another_decode_worker(self, cluster, error):
        prefill, first, second = await cluster.add_all(["p1", "d1", "d2"])
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), handoff_failed(error))]
        first.scripts = [hang_telling(claimed)]
        request = cluster.request()
        assert await cluster.run(request) == expected_tokens(6)
        [resumed] = second.requests
        assert resumed.transfer_id == ""
        assert list(resumed.sequence.output_token_ids) == expected_tokens(1)
        assert request.timeline.attributes["handoff_error"] == error.code
        assert request.timeline.attributes["decode_worker"] == "d2"
        assert cluster.metric("baton_kv_transfers_total", outcome="failed") == 1
        await until(lambda: cluster.is_idle)

    async def test_a_handoff_that_fails_behind_the_second_token_disturbs_nobody(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        decoding = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: decoding.wait(), handoff_failed(TransferError("no acknowledgement")))]

        async def watched(worker, request):
            async for message in good_decode(worker, request):
                yield message
                decoding.set()

        decode.scripts = [watched]
        assert await cluster.run() == expected_tokens(6)
        assert len(decode.requests) == 1
        await until(lambda: cluster.is_idle)

    async def test_a_second_first_token_is_ignored_and_the_request_recomputed(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        again = worker_pb2.PrefillEvent(first_token=worker_pb2.TokenBatch(token_ids=[4]))
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), again)]
        decode.scripts = [hang_telling(claimed)]
        assert await cluster.run() == expected_tokens(6)

    async def test_word_of_a_handoff_before_the_first_token_is_no_token(self):
        async with fresh(max_attempts=1) as cluster:
            prefill, _ = await cluster.add_all(["p1", "d1"])

            async def wrong_order(worker, request):
                yield worker.handoff_done()

            prefill.scripts = [wrong_order]
            with pytest.raises(WorkerLostError, match="without a token"):
                await cluster.run()
            await until(lambda: cluster.is_idle)

    async def test_an_event_that_nobody_knows_is_an_internal_error_and_not_a_hang(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])

        async def unknown_event(worker, request):
            event = worker_pb2.TimedEvent(name="teleported", at_s=1.0)
            yield worker_pb2.PrefillEvent(first_token=batch(request, 0), events=[event])

        prefill.scripts = [unknown_event]
        with pytest.raises(InternalError, match="teleported"):
            await cluster.run()
        assert cluster.metric("baton_requests_total", outcome="internal_error") == 1
        await until(lambda: cluster.is_idle)


class TestDecodeFailures:
    @pytest.mark.parametrize("num_tokens", [0, 1, 3])
    @pytest.mark.parametrize(
        "then", [death, WorkerLostError("gone"), OutOfBlocksError("full")], ids=["died", "lost", "full"]
    )
    async def test_another_worker_goes_on_where_the_stream_broke(self, cluster, num_tokens, then):
        _, bad, good = await cluster.add_all(["p1", "d1", "d2"])
        bad.scripts = [decode_some(num_tokens, then)]
        assert await cluster.run() == expected_tokens(6)
        [resumed] = good.requests
        # A token may still have been on its way when the connection broke; what the client has is passed on.
        passed_on = list(resumed.sequence.output_token_ids)
        assert passed_on == expected_tokens(len(passed_on))
        assert 1 <= len(passed_on) <= 1 + num_tokens
        await until(lambda: cluster.is_idle)

    async def test_an_error_in_the_stream_comes_behind_its_tokens(self, cluster):
        _, bad, good = await cluster.add_all(["p1", "d1", "d2"])
        bad.scripts = [decode_some(3, TransferError("no"))]
        assert await cluster.run() == expected_tokens(6)
        assert list(good.requests[0].sequence.output_token_ids) == expected_tokens(4)

    async def test_a_stream_that_ends_too_early_is_continued(self, cluster):
        _, bad, good = await cluster.add_all(["p1", "d1", "d2"])
        bad.scripts = [end_at_once]
        assert await cluster.run() == expected_tokens(6)
        assert (len(bad.requests), len(good.requests)) == (1, 1)

    async def test_streams_that_keep_ending_too_early_use_up_the_attempts(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [end_at_once] * 3
        with pytest.raises(WorkerLostError, match="d1 ended its stream without finishing"):
            await cluster.run()
        assert len(decode.requests) == 3

    async def test_a_worker_that_failed_the_request_is_avoided_even_if_the_other_is_busier(self, cluster):
        _, bad, busy = await cluster.add_all(["p1", "d1", "d2"])
        bad.scripts, busy.scripts = [hang] * 3, [hang] * 3
        stuck = [asyncio.create_task(cluster.run(cluster.request(f"stuck{i}"))) for i in range(3)]
        await until(lambda: (bad.num_open, busy.num_open) in ((1, 2), (2, 1)))
        bad, busy = sorted((bad, busy), key=lambda worker: worker.num_open)
        bad.scripts, busy.scripts = [failing(TransferError("no"))], []
        assert await cluster.run() == expected_tokens(6)
        assert bad.requests[-1].transfer_id
        assert not busy.requests[-1].transfer_id
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    async def test_the_only_worker_is_tried_again(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [decode_some(2, TransferError("no")), decode_some(1, TransferError("no"))]
        request = cluster.request()
        assert await cluster.run(request) == expected_tokens(6)
        assert request.timeline.attributes["attempts"] == 3
        assert len(set(decode.call_ids)) == 3

    async def test_the_last_error_reaches_the_client_when_attempts_are_used_up(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [
            failing(TransferError("one")),
            failing(WorkerLostError("two")),
            failing(OutOfBlocksError("3")),
        ]
        stream = cluster.stream()
        assert list((await anext(stream)).token_ids) == expected_tokens(1)
        with pytest.raises(OutOfBlocksError, match="3"):
            await anext(stream)
        assert cluster.metric("baton_requests_total", outcome="out_of_kv_blocks") == 1
        await until(lambda: cluster.is_idle)

    @pytest.mark.parametrize("error", [InvalidRequestError("bad"), ContextLengthError("long"), InternalError("ours")])
    async def test_other_errors_are_not_tried_again(self, cluster, error):
        _, decode, other = await cluster.add_all(["p1", "d1", "d2"])
        decode.scripts = [failing(error)]
        with pytest.raises(type(error), match=error.message):
            await cluster.run()
        assert other.requests == []
        await until(lambda: cluster.is_idle)

    async def test_invalid_requests_fail_at_once_in_prefill_too(self, cluster):
        prefill, other, decode = await cluster.add_all(["p1", "p2", "d1"])
        prefill.scripts = [failing(InvalidRequestError("bad token"))]
        with pytest.raises(InvalidRequestError, match="bad token"):
            await cluster.run()
        assert other.requests == decode.requests == []

    @pytest.mark.parametrize("error", [WorkerLostError("too late"), InternalError("too late")], ids=lambda e: e.code)
    async def test_an_error_behind_the_last_token_does_not_matter(self, cluster, error):
        _, decode = await cluster.add_all(["p1", "d1"])

        async def fail_after_the_end(worker, request):
            async for message in good_decode(worker, request):
                yield message
            raise error

        decode.scripts = [fail_after_the_end]
        assert await cluster.run() == expected_tokens(6)
        assert cluster.metric("baton_requests_total", outcome="length") == 1
        assert cluster.metric("baton_retries_total", reason="worker_lost") == 0
        assert len(decode.requests) == 1

    async def test_a_worker_that_leaves_the_table_loses_its_streams_but_no_client(self, cluster):
        _, leaving, _ = await cluster.add_all(["p1", "d1", "d2"])
        leaving.scripts = [decode_some(2, for_ever)]
        async with aclosing(cluster.stream()) as chunks:
            got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
            removal = asyncio.create_task(cluster.registry.remove("d1"))
            got += [token async for chunk in chunks for token in chunk.token_ids]
            await removal
        assert got == expected_tokens(6)


class TestWorkersThatComeAndGo:
    async def test_without_workers_a_request_waits_and_then_fails(self):
        async with fresh(worker_wait_s=0.05) as cluster:
            await cluster.add("p1")
            with pytest.raises(NoWorkerError, match=r"No decode worker .* 0\.05 s"):
                await cluster.run()
            assert cluster.metric("baton_requests_total", outcome="no_worker_available") == 1
            assert cluster.is_idle

    async def test_a_worker_that_appears_while_a_request_waits_is_used(self, cluster):
        await cluster.add("p1")
        waiting = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await cluster.add("d1")
        assert await waiting == expected_tokens(6)

    async def test_while_one_pool_is_empty_no_worker_of_the_other_is_held(self, cluster):
        await cluster.add("d1")
        waiting = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        cluster.registry.drain("d1")
        worker = cluster.registry.get("d1")
        assert worker is not None
        await asyncio.wait_for(worker.idle.wait(), 1)
        await cluster.registry.remove("d1")
        await cluster.add_all(["p1", "d2"])
        assert await waiting == expected_tokens(6)

    async def test_draining_and_suspect_workers_get_nothing_new(self, cluster):
        workers = await cluster.add_all(["p1", "p2", "p3", "d1"])
        cluster.registry.drain("p1")
        suspect = cluster.registry.get("p2")
        assert suspect is not None
        suspect.suspect()
        for index in range(3):
            await cluster.run(cluster.request(f"r{index}"))
        assert [len(worker.requests) for worker in workers[:3]] == [0, 0, 3]

    async def test_a_dead_worker_becomes_a_suspect(self, cluster):
        bad, _, _ = await cluster.add_all(["p1", "p2", "d1"])
        bad.scripts = [die]
        await cluster.run()
        worker = cluster.registry.get("p1")
        assert worker is not None
        assert not worker.snapshot().accepting
        assert cluster.router.is_ready()

    async def test_draining_waits_for_the_handoff_and_not_only_for_the_first_token(self, cluster):
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

    async def test_a_request_counts_from_the_moment_it_is_routed(self, cluster):
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
            decode.scripts = [decode_some(2, for_ever)]
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
            with pytest.raises(DeadlineError):
                await cluster.run()

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
    async def test_before_the_first_token(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [hang]
        running = asyncio.create_task(cluster.run())
        await until(lambda: prefill.num_open == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: cluster.is_idle)
        assert prefill.num_cancelled == 1

    async def test_after_the_first_token_with_the_handoff_under_way(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [prefill_then(for_ever)]
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
        assert (cluster.in_flight("p1"), cluster.in_flight("d1")) == (0, 0)
        await until(lambda: cluster.is_idle)
        assert (prefill.num_cancelled, decode.requests) == (1, [])

    async def test_while_both_workers_are_busy_with_it(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        prefill.scripts = [prefill_then(for_ever)]
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
    async def test_in_the_middle_of_the_stream(self, cluster, num_chunks):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [decode_some(5, for_ever)]
        async with aclosing(cluster.stream(cluster.request(max_tokens=50))) as chunks:
            for _ in range(num_chunks):
                await anext(chunks)
        assert cluster.in_flight("d1") == 0
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    async def test_while_waiting_for_a_worker(self, cluster):
        running = asyncio.create_task(cluster.run())
        await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cluster.is_idle

    async def test_of_a_resumed_request(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [failing(TransferError("no")), decode_some(1, for_ever)]
        async with aclosing(cluster.stream()) as chunks:
            await anext(chunks)
            await anext(chunks)
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    async def test_at_any_moment(self, cluster):
        """One request after the other, cancelled a little later each time: nothing may stay behind."""
        await cluster.add_all(["p1", "p2", "d1", "d2"])
        for step in range(40):
            running = asyncio.create_task(cluster.run(cluster.request(f"r{step}")))
            await asyncio.sleep(step * 0.003)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await until(lambda: cluster.is_idle)
        assert await cluster.run(cluster.request("afterwards")) == expected_tokens(6)


class TestManyAtOnce:
    async def test_none_is_lost_or_doubled_while_workers_fail(self, cluster):
        workers = await cluster.add_all(["p1", "p2", "d1", "d2", "d3"])
        for worker in workers[:2]:
            worker.scripts = [failing(OutOfBlocksError("full"))] * 2
        for worker in workers[2:]:
            worker.scripts = [decode_some(n % 4, TransferError("no")) for n in range(3)]
        results = await asyncio.gather(*(cluster.run(cluster.request(f"r{i}", 4 + i % 7)) for i in range(60)))
        assert results == [expected_tokens(4 + i % 7) for i in range(60)]
        await until(lambda: cluster.is_idle)
        assert cluster.router.num_finished == 60
        assert cluster.router.num_failed == 0
