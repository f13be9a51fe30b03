"""The admission queue: order, departures, and the number of checks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import NoWorkerError, OverloadedError
from baton.core.slo import INTERACTIVE, STANDARD
from cluster.admission.admission_config import AdmissionConfig
from cluster.admission.batching_delay import BatchingDelay
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision
from tests.unit.cluster.admission.fake_cluster import PROMPT_MS, FakePlacement, Scene
from tests.unit.cluster.admission.scenes import MODEST, PATIENT, fill, play


def test_the_more_urgent_class_goes_first_and_the_lower_one_gets_its_share() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        low = [scene.ask(MODEST) for _ in range(40)]
        await asyncio.sleep(0)
        queued_at = len(scene.cluster.booked)
        for _ in range(400):  # ever more of the high class, twice as many as there is room for
            scene.ask(PATIENT)
            await asyncio.sleep(PROMPT_MS / 2e3)
        went = [record.request.slo.name for record in scene.cluster.booked[queued_at:]]
        share = went.count("modest") / len(went)
        assert 0.02 < share < 0.08
        for _, task in low:
            task.cancel()

    play(script, classes=(PATIENT, MODEST))


def test_without_a_share_the_lower_class_starves() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        low = [scene.ask(MODEST) for _ in range(5)]
        for _ in range(120):
            scene.ask(PATIENT)
            await asyncio.sleep(PROMPT_MS / 2e3)
        assert not any(task.done() for _, task in low)
        for _, task in low:
            task.cancel()

    play(script, classes=(PATIENT, MODEST), config=AdmissionConfig(fair_share=0.0))


def test_a_full_queue_drops_the_least_urgent() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        low = [scene.ask(MODEST) for _ in range(3)]
        await asyncio.sleep(0)
        assert scene.admission.num_queued == 3
        scene.ask(PATIENT)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended = [task for _, task in low if task.done()]
        assert ended == [low[-1][1]]
        error = ended[0].exception()
        assert isinstance(error, OverloadedError)
        assert error.reason == "queue_full"
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(MODEST))
        assert raised.value.reason == "queue_full"
        assert scene.admission.num_queued == 3

    play(script, classes=(PATIENT, MODEST), config=AdmissionConfig(max_queued=3))


def test_a_request_cancelled_while_waiting_leaves_nothing() -> None:
    async def script(scene: Scene) -> None:
        tasks = await fill(scene, STANDARD)
        record, task = scene.ask(STANDARD)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scene.admission.num_queued == 0
        await asyncio.sleep(30)
        assert record not in scene.cluster.booked
        assert len(scene.cluster.booked) == len(tasks)

    play(script)


def test_a_request_cancelled_when_admitted_frees_its_slot() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, STANDARD)
        record, task = scene.ask(STANDARD)
        await asyncio.sleep(0)
        real_book = scene.cluster.book
        given: list[FakePlacement] = []

        def book(record: RequestRecord, decision: object) -> FakePlacement:
            given.append(real_book(record, decision))  # type: ignore[arg-type]
            scene.loop.call_soon(task.cancel)  # after the booking, before the waiting task resumes
            return given[-1]

        scene.cluster.book = book  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [placement.num_releases for placement in given] == [1]
        assert record is given[0].record

    play(script)


def test_without_workers_the_queue_pauses_and_then_fails() -> None:
    async def script(scene: Scene) -> None:
        scene.cluster.has_workers = False
        _, early = scene.ask(INTERACTIVE)
        await asyncio.sleep(2)
        scene.cluster.has_workers = True
        assert (await early).num_releases == 0
        scene.cluster.has_workers = False
        began_s = scene.loop.time()
        with pytest.raises(NoWorkerError, match="No decode worker accepted the request within 5 s"):
            await scene.admission.admit(scene.record(INTERACTIVE))
        assert scene.loop.time() - began_s == pytest.approx(5.0)

    play(script)


def test_queued_requests_wait_for_workers_no_longer_than_others() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        _, early = scene.ask(PATIENT)
        await asyncio.sleep(0)
        scene.cluster.has_workers = False
        await asyncio.sleep(4)
        assert not early.done()
        scene.cluster.has_workers = True
        assert (await early).num_releases == 0
        await fill(scene, PATIENT)
        late = [scene.ask(PATIENT)[1] for _ in range(3)]
        await asyncio.sleep(0)
        scene.cluster.has_workers, began_s = False, scene.loop.time()
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(result, NoWorkerError)
            assert "No decode worker accepted the request within 5 s" in result.message
        assert scene.loop.time() - began_s == pytest.approx(5.0, abs=1.1)
        assert scene.admission.num_queued == 0

    play(script, classes=(PATIENT,))


def test_a_retry_does_not_wait_in_the_queue_again() -> None:
    async def script(scene: Scene) -> None:
        record = scene.record(INTERACTIVE)
        (await scene.admission.admit(record)).release()
        scene.cluster.has_workers = False
        record.attempt = 2
        again = scene.loop.create_task(scene.admission.admit(record))
        await asyncio.sleep(2)
        scene.cluster.has_workers = True
        await again
        assert record.timeline.attributes["admission_wait_ms"] == 0
        assert scene.value("baton_admission_wait_seconds_count", slo_class="interactive") == 1

    play(script)


def test_a_retry_is_not_admitted_again() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, INTERACTIVE)
        record = scene.record(INTERACTIVE)
        record.attempt = 2
        assert (await scene.admission.admit(record)).record is record

    play(script)


def test_closing_fails_all_waiting_requests() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, STANDARD)
        waiting = [scene.ask(STANDARD)[1] for _ in range(5)]
        await asyncio.sleep(0)
        scene.admission.close()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, OverloadedError)
            assert result.reason == "stopping"
        with pytest.raises(OverloadedError):
            await scene.admission.admit(scene.record(STANDARD))

    play(script)


def test_closing_also_counts_requests_waiting_for_workers() -> None:
    async def script(scene: Scene) -> None:
        scene.cluster.has_workers = False
        _, task = scene.ask(INTERACTIVE)
        await asyncio.sleep(0.1)
        scene.admission.close()
        with pytest.raises(OverloadedError):
            await task
        assert scene.value("baton_admission_refusals_total", slo_class="interactive", reason="stopping") == 1

    play(script)


def test_a_burst_of_wakeups_causes_one_pass() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, STANDARD)
        scene.ask(STANDARD)
        await asyncio.sleep(0)
        before = scene.cluster.num_forecasts
        for _ in range(100):
            scene.admission.poke()
        await asyncio.sleep(0.01)
        assert scene.cluster.num_forecasts - before <= 2

    play(script)


class OneStep(BatchingDelay):
    """Holds every request for 5 ms."""

    def __init__(self) -> None:
        self.num_arrived = 0

    def arrived(self, now_s: float) -> None:
        self.num_arrived += 1

    def delay_ms(self, *args: object, **kwargs: object) -> float:
        return 5.0


def test_batched_requests_go_together_and_in_order() -> None:
    async def script(scene: Scene) -> None:
        scene.admission._batching_delay = OneStep()
        asked = []
        for _ in range(3):
            asked.append(scene.ask(STANDARD))
            await asyncio.sleep(0.001)
        assert not any(task.done() for _, task in asked)
        asked[1][1].cancel()
        await asyncio.sleep(0.004)
        assert scene.cluster.booked == [asked[0][0], asked[2][0]]
        assert scene.loop.time() < 0.01
        assert scene.value("baton_admission_gather_seconds_count") == 2
        assert asked[0][0].timeline.attributes["admission_waited_for"] == "gathering"

    play(script)


def test_a_batched_request_without_room_is_refused_once() -> None:
    async def script(scene: Scene) -> None:
        await scene.admission.admit(scene.record(STANDARD))  # an idle cluster takes everything
        scene.admission._batching_delay = OneStep()
        _, task = scene.ask(INTERACTIVE)
        await asyncio.sleep(0.001)
        scene.cluster.fall_behind(10.0)
        with pytest.raises(OverloadedError):
            await task
        assert scene.value("baton_admission_refusals_total", slo_class="interactive", reason="prefill") == 1

    play(script)


def test_a_batched_request_waits_for_workers_that_leave() -> None:
    async def script(scene: Scene) -> None:
        scene.admission._batching_delay = OneStep()
        for returns in (True, False):
            _, task = scene.ask(INTERACTIVE)
            await asyncio.sleep(0.001)
            scene.cluster.has_workers = False
            await asyncio.sleep(2)  # as long as a worker is suspected
            assert not task.done()
            scene.cluster.has_workers = returns
            if returns:
                assert (await task).num_releases == 0
            else:
                with pytest.raises(NoWorkerError, match="No decode worker accepted the request within 5 s"):
                    await task
        assert scene.admission.num_queued == 0

    play(script)


def test_only_prefill_workers_with_prompts_count_as_busy_for_batching() -> None:
    busy = []

    class QueuedRequest(OneStep):
        def delay_ms(self, *args: object, **kwargs: Any) -> float:
            busy.append(kwargs["computes_prompts"]("prefill-0"))
            return 0.0

    async def script(scene: Scene) -> None:
        scene.admission._batching_delay = QueuedRequest()
        forecast = scene.cluster.forecast

        def local(record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
            decision = forecast(record, preferred)
            return None if decision is None else replace(decision, prefill_id=None)

        scene.cluster.forecast = local  # type: ignore[method-assign]
        await scene.admission.admit(scene.record(STANDARD))
        scene.cluster.forecast = forecast  # type: ignore[method-assign]
        await scene.admission.admit(scene.record(STANDARD))  # a decode worker has the first prompt
        (await scene.admission.admit(scene.record(STANDARD))).release()
        await asyncio.sleep(5 * PROMPT_MS / 1e3)
        await scene.admission.admit(scene.record(STANDARD))
        assert busy == [False, False, True, False]

    play(script)


def test_no_wait_exceeds_the_deadline_of_the_request() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        record = scene.record(PATIENT, timeout_s=20.0)
        waiting = scene.loop.create_task(scene.admission.admit(record))
        await asyncio.sleep(0)
        scene.cluster.has_workers = False  # no request can start any more
        with pytest.raises(OverloadedError) as raised:
            await waiting
        assert scene.loop.time() == pytest.approx(20.0, abs=0.1)
        assert raised.value.reason == "queue_deadline"
        assert "This request waited 20 s, its limit" in raised.value.message
        assert "router.request_timeout_s" in raised.value.message

    play(script, classes=(PATIENT,), worker_wait_s=600.0)


def test_the_stated_limit_of_a_refusal_includes_the_timeout_of_the_request() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        scene.cluster.fall_behind(30.0)
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(PATIENT, timeout_s=20.0))
        assert "may wait for 20 s only" in raised.value.message

    play(script, classes=(PATIENT,))
