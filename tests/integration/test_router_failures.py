"""The router with workers that fail, hang and die, over real gRPC connections: no token is lost or doubled."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from baton.core.errors import (
    ChecksumError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OutOfBlocksError,
    RequestCancelledError,
    TransferError,
    WorkerLostError,
)
from baton.explain.critical_path import Stage, critical_path
from baton.rpc.wire import worker_pb2
from cluster.registry.progress_judge import Standing
from tests.fake_workers import (
    FakeCluster,
    batch,
    death,
    decode_some,
    die,
    end_at_once,
    endless,
    expected_tokens,
    failing,
    fresh,
    good_decode,
    handoff_failed,
    hang,
    hang_and_signal,
    prefill_then,
)
from tests.waiting import TIMEOUT_S, until


@pytest.fixture
async def cluster():
    async with FakeCluster() as fake:
        yield fake


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
    async def test_the_decode_worker_recomputes_when_prefill_is_lost_after_the_first_token(self, cluster, after):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), *after)]
        decode.scripts = [hang_and_signal(claimed)]  # no KV ever comes
        assert await cluster.run() == expected_tokens(6)
        first, second = decode.requests
        assert (first.transfer_id != "", second.transfer_id) == (True, "")
        assert list(second.sequence.output_token_ids) == expected_tokens(1)
        await until(lambda: cluster.is_idle)
        assert decode.num_cancelled == 1

    @pytest.mark.parametrize("silent", ["p1", "d1"])
    async def test_a_handoff_that_fails_silently_avoids_the_unresponsive_worker(self, cluster, silent):
        """The decode worker receives nothing more, and the router does not know why."""
        prefill, decode, _ = await cluster.add_all(["p1", "d1", "d2"])
        prefill.scripts = [prefill_then(endless)]

        async def wait_in_vain(worker, request):
            cluster.registry.judged(silent, Standing.SUSPECTED, "it has not answered for 3 s")
            raise TransferError("the transfer brought nothing new for 10 s")
            yield

        decode.scripts = [wait_in_vain]
        assert await cluster.run() == expected_tokens(6)
        suspects = [worker.info.worker_id for worker in cluster.registry.workers if not worker.is_accepting]
        assert suspects == [silent]
        await until(lambda: cluster.is_idle)

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
    async def test_another_decode_worker_takes_over_after_a_failed_handoff(self, cluster, error):
        prefill, first, second = await cluster.add_all(["p1", "d1", "d2"])
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), handoff_failed(error))]
        first.scripts = [hang_and_signal(claimed)]
        request = cluster.request()
        assert await cluster.run(request) == expected_tokens(6)
        [resumed] = second.requests
        assert resumed.transfer_id == ""
        assert list(resumed.sequence.output_token_ids) == expected_tokens(1)
        assert request.timeline.attributes["handoff_error"] == error.code
        assert request.timeline.attributes["decode_worker"] == "d2"
        assert cluster.metric("baton_kv_transfers_total", outcome="failed") == 1
        await until(lambda: cluster.is_idle)

    async def test_a_handoff_failure_after_the_second_token_is_harmless(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        arrived = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: arrived.wait(), handoff_failed(TransferError("no acknowledgement")))]
        tokens: list[int] = []
        async with asyncio.timeout(TIMEOUT_S), aclosing(cluster.stream()) as chunks:
            async for chunk in chunks:
                tokens += chunk.token_ids
                if len(tokens) > 1:
                    arrived.set()
        assert tokens == expected_tokens(6)
        assert len(decode.requests) == 1
        await until(lambda: cluster.is_idle)

    async def test_a_second_first_token_is_ignored_and_the_request_is_recomputed(self, cluster):
        prefill, decode = await cluster.add_all(["p1", "d1"])
        again = worker_pb2.PrefillEvent(first_token=worker_pb2.TokenBatch(token_ids=[4]))
        claimed = asyncio.Event()
        prefill.scripts = [prefill_then(lambda _: claimed.wait(), again)]
        decode.scripts = [hang_and_signal(claimed)]
        assert await cluster.run() == expected_tokens(6)

    async def test_a_handoff_event_before_the_first_token_is_not_a_token(self):
        async with fresh(max_attempts=1) as cluster:
            prefill, _ = await cluster.add_all(["p1", "d1"])

            async def wrong_order(worker, request):
                yield worker.handoff_done()

            prefill.scripts = [wrong_order]
            with pytest.raises(WorkerLostError, match="without a token"):
                await cluster.run()
            await until(lambda: cluster.is_idle)

    async def test_an_unknown_event_is_an_internal_error(self, cluster):
        prefill, _ = await cluster.add_all(["p1", "d1"])

        async def unknown_event(worker, request):
            event = worker_pb2.TimedEvent(name="teleported", at_s=1.0)
            yield worker_pb2.PrefillEvent(first_token=batch(request, 0), events=[event])

        prefill.scripts = [unknown_event]
        with pytest.raises(InternalError, match="ValueError"):
            await cluster.run()
        assert cluster.metric("baton_requests_total", outcome="internal_error") == 1
        await until(lambda: cluster.is_idle)


class TestDecodeFailures:
    @pytest.mark.parametrize("num_tokens", [0, 1, 3])
    @pytest.mark.parametrize(
        "then", [death, WorkerLostError("gone"), OutOfBlocksError("full")], ids=["died", "lost", "full"]
    )
    async def test_another_worker_continues_a_broken_stream(self, cluster, num_tokens, then):
        _, bad, good = await cluster.add_all(["p1", "d1", "d2"])
        bad.scripts = [decode_some(num_tokens, then)]
        assert await cluster.run() == expected_tokens(6)
        [resumed] = good.requests
        # A token may still have been on its way when the connection broke; what the client has is passed on.
        passed_on = list(resumed.sequence.output_token_ids)
        assert passed_on == expected_tokens(len(passed_on))
        assert 1 <= len(passed_on) <= 1 + num_tokens
        await until(lambda: cluster.is_idle)

    async def test_an_error_in_the_stream_follows_its_tokens(self, cluster):
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

    async def test_drafts_of_every_attempt_are_counted_by_method(self, cluster):
        _, bad, good = await cluster.add_all(["p1", "d1", "d2"])

        def drafting(method: str, then: TransferError | None):
            async def script(worker, request):
                for position in range(len(request.sequence.output_token_ids), 6 if then is None else 3):
                    message = batch(request, position)
                    message.num_drafted, message.num_accepted, message.drafted_by = 4, 1, method
                    yield message
                if then is not None:
                    raise then

            return script

        bad.scripts, good.scripts = [drafting("eagle3", TransferError("no"))], [drafting("suffix", None)]
        request = cluster.request()
        assert await cluster.run(request) == expected_tokens(6)
        await until(lambda: cluster.is_idle)
        shown = cluster.timelines.to_dict("r")
        assert shown["drafts"] == {
            "eagle3": {"drafted_tokens": 8, "accepted_tokens": 2},
            "suffix": {"drafted_tokens": 12, "accepted_tokens": 3},
        }
        assert (shown["attributes"]["drafted_tokens"], shown["attributes"]["accepted_tokens"]) == (20, 5)

    async def test_the_only_worker_is_retried(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [decode_some(2, TransferError("no")), decode_some(1, TransferError("no"))]
        request = cluster.request()
        assert await cluster.run(request) == expected_tokens(6)
        assert request.timeline.attributes["attempts"] == 3
        assert len(set(decode.call_ids)) == 3

    async def test_failures_with_tokens_in_between_do_not_use_up_the_attempts(self, cluster):
        _, decode = await cluster.add_all(["p1", "d1"])
        decode.scripts = [decode_some(1, WorkerLostError("killed")) for _ in range(4)]
        assert await cluster.run() == expected_tokens(6)
        assert len(decode.requests) == 5

    async def test_the_client_gets_the_last_error_after_all_attempts(self, cluster):
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

    @pytest.mark.parametrize("error", [InvalidRequestError("bad"), ContextLengthError("long")])
    async def test_other_errors_are_not_retried(self, cluster, error):
        _, decode, other = await cluster.add_all(["p1", "d1", "d2"])
        decode.scripts = [failing(error)]
        with pytest.raises(type(error), match=error.message):
            await cluster.run()
        assert other.requests == []
        await until(lambda: cluster.is_idle)

    async def test_invalid_requests_fail_at_once_in_prefill(self, cluster):
        prefill, other, decode = await cluster.add_all(["p1", "p2", "d1"])
        prefill.scripts = [failing(InvalidRequestError("bad token"))]
        with pytest.raises(InvalidRequestError, match="bad token"):
            await cluster.run()
        assert other.requests == decode.requests == []

    @pytest.mark.parametrize("error", [WorkerLostError("too late"), InternalError("too late")], ids=lambda e: e.code)
    async def test_an_error_after_the_last_token_is_ignored(self, cluster, error):
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

    async def test_removing_a_worker_moves_its_streams_to_another(self, cluster):
        _, leaving, _ = await cluster.add_all(["p1", "d1", "d2"])
        leaving.scripts = [decode_some(2, endless)]
        async with aclosing(cluster.stream()) as chunks:
            got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
            removal = asyncio.create_task(cluster.registry.remove("d1"))
            got += [token async for chunk in chunks for token in chunk.token_ids]
            await removal
        assert got == expected_tokens(6)

    async def test_waiting_for_another_worker_counts_as_routing(self, cluster):
        _, leaving = await cluster.add_all(["p1", "d1"])
        leaving.scripts = [decode_some(2, endless)]
        request = cluster.request()
        failed = request.timeline.failed_attempts
        async with asyncio.timeout(TIMEOUT_S), aclosing(cluster.stream(request)) as chunks:
            got = [(await anext(chunks)).token_ids[0] for _ in range(3)]
            rest = asyncio.create_task(anext(chunks))
            await cluster.registry.remove("d1")
            await until(lambda: failed)
            assert failed[0].resumed_s is None
            added_s = request.timeline.clock()
            await cluster.add("d2")
            got += (await rest).token_ids
            got += [token async for chunk in chunks for token in chunk.token_ids]
        assert got == expected_tokens(6)
        [attempt] = failed
        assert attempt.failed_s <= added_s <= attempt.resumed_s
        routes = [
            (entry.start_s, entry.end_s) for entry in critical_path(request.timeline) if entry.stage is Stage.ROUTE
        ]
        assert routes[-1] == (attempt.failed_s, attempt.resumed_s)


class TestManyAtOnce:
    async def test_no_token_is_lost_or_repeated_while_workers_fail(self, cluster):
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
