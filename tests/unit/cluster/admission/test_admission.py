"""Admission: requests start, wait or are refused, with the reason."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import OverloadedError
from baton.core.queue_priority import QueuePriority
from baton.core.slo import INTERACTIVE, STANDARD, SloClass
from baton.core.timeline import Event
from cluster.admission.admission_config import AdmissionConfig
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision
from tests.unit.cluster.admission.fake_cluster import OUTPUT_TOKENS, PROMPT_MS, FakePlacement, Scene
from tests.unit.cluster.admission.scenes import LAX, PATIENT, SHORT, TIGHT, USUAL, fill, play


def test_an_idle_cluster_accepts_everything_however_slow() -> None:
    impossible = SloClass("impossible", 0.001, 0.0001, percentile=95.0, priority=2, queue_deadline_s=0.0)

    async def script(scene: Scene) -> None:
        for _ in range(3):
            placement = await scene.admission.admit(scene.record(impossible))
            await asyncio.sleep(10)
            assert placement.num_releases == 1

    play(script, classes=(impossible,))


def test_a_request_that_cannot_wait_is_refused_at_once() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, INTERACTIVE)
        began_s, forecasts = scene.loop.time(), scene.cluster.num_forecasts
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(INTERACTIVE))
        assert scene.loop.time() == began_s
        assert scene.cluster.num_forecasts == forecasts + 1
        error = raised.value
        assert error.reason == "prefill"
        assert "'interactive' is 1000 ms" in error.message
        assert error.predicted_wait_s is not None
        assert 0 < error.predicted_wait_s < 1
        assert error.retry_after_s == 1.0
        refused = scene.value("baton_admission_refusals_total", slo_class="interactive", reason="prefill")
        assert refused is not None
        assert refused >= 1

    play(script)


def test_a_full_decode_pool_is_named_in_the_error() -> None:
    async def script(scene: Scene) -> None:
        placements = await fill(scene, TIGHT)
        assert 2 <= len(placements) < 15
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(TIGHT))
        assert raised.value.reason == "decode"
        assert "decode pool is full" in raised.value.message

    play(script, classes=(TIGHT,))


def test_running_sequences_keep_their_targets() -> None:
    async def script(scene: Scene) -> None:
        tight = await fill(scene, TIGHT)
        assert len(tight) >= 2
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(LAX))  # it would not mind, they would
        assert raised.value.reason == "decode"

    play(script, classes=(TIGHT, LAX))


def test_a_request_that_can_wait_is_admitted_in_time() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, STANDARD)
        record, task = scene.ask(STANDARD)
        await asyncio.sleep(0)
        assert scene.admission.num_queued == 1
        assert not task.done()
        assert scene.value("baton_admission_queued", slo_class="standard") == 1
        placement = await task
        assert placement.record is record
        assert scene.admission.num_queued == 0
        waited_ms = record.timeline.attributes["admission_wait_ms"]
        assert isinstance(waited_ms, float)
        assert 0 < waited_ms < STANDARD.queue_deadline_s * 1e3
        assert record.timeline.attributes["admission_waited_for"] == "prefill"
        assert Event.DISPATCHED in record.timeline.events

    play(script)


def test_a_request_whose_wait_is_too_long_is_refused_at_once() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, USUAL)
        tasks = []
        for _ in range(400):
            _, task = scene.ask(USUAL)
            tasks.append(task)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [task for task in tasks if task.done() and task.exception() is not None]
        # Ten prompts a second, and 15 s of patience.
        assert 200 < len(refused) < 300
        error = refused[-1].exception()
        assert isinstance(error, OverloadedError)
        assert error.predicted_wait_s is not None
        assert error.predicted_wait_s > USUAL.queue_deadline_s
        await asyncio.gather(*tasks, return_exceptions=True)
        late = scene.value("baton_admission_refusals_total", slo_class="standard", reason="queue_deadline")
        assert late is not None
        assert late < 0.1 * len(tasks)

    play(script, classes=(USUAL,))


def test_a_deadline_ends_the_wait() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, USUAL)
        _, task = scene.ask(USUAL)
        await asyncio.sleep(0)
        scene.cluster.has_workers = False  # no request can start any more
        with pytest.raises(OverloadedError) as raised:
            await task
        assert raised.value.reason == "queue_deadline"
        assert scene.loop.time() == pytest.approx(USUAL.queue_deadline_s, abs=0.6)

    play(script, classes=(USUAL,), worker_wait_s=600.0)


def test_a_lost_target_does_not_extend_the_wait() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        asked = [scene.ask(PATIENT) for _ in range(50)]  # 5 s of work, and a target of 1 s
        placements = await asyncio.gather(*(task for _, task in asked))
        assert [placement.record for placement in placements] == [record for record, _ in asked]

    play(script, classes=(PATIENT,))


def test_late_requests_do_not_delay_others() -> None:
    async def script(scene: Scene) -> None:
        records = []
        for _ in range(600):  # twice as many as there is room for
            records.append(scene.ask(PATIENT)[0])
            await asyncio.sleep(PROMPT_MS / 2e3)
        ttfts = [record.timeline.ttft_ms for record in records if record.token_ids]
        in_time = [ttft_ms for ttft_ms in ttfts if ttft_ms is not None and ttft_ms <= PATIENT.ttft_s * 1e3]
        assert len(in_time) >= 0.6 * len(ttfts)

    play(script, classes=(PATIENT,))


HOPELESS = SloClass("hopeless", ttft_s=0.05, tpot_s=0.5, percentile=95.0, priority=3, queue_deadline_s=0.0)
"""An idle cluster takes 100 ms for a prompt."""


def test_a_request_that_misses_its_target_takes_no_room_from_others() -> None:
    async def script(scene: Scene) -> None:
        first = await scene.admission.admit(scene.record(INTERACTIVE))
        await asyncio.sleep(2 * PROMPT_MS / 1e3)  # the prompt is computed, others decode
        await scene.admission.admit(scene.record(HOPELESS))  # no request lacks room
        assert first.record in scene.cluster.booked
        await asyncio.sleep(2 * PROMPT_MS / 1e3)
        await fill(scene, INTERACTIVE)
        with pytest.raises(OverloadedError):
            await scene.admission.admit(scene.record(INTERACTIVE))
        await asyncio.sleep(1.5)  # all of their prompts are computed
        scene.ask(INTERACTIVE)  # something is under way
        await asyncio.sleep(2 * PROMPT_MS / 1e3)
        with pytest.raises(OverloadedError) as raised:
            await scene.admission.admit(scene.record(HOPELESS))
        assert raised.value.reason == "prefill"
        assert "no other route" in raised.value.message
        scene.ask(INTERACTIVE)
        await asyncio.sleep(10)
        scene.ask(INTERACTIVE)
        await asyncio.sleep(2 * PROMPT_MS / 1e3)
        await scene.admission.admit(scene.record(HOPELESS))  # that was long ago

    play(script, classes=(INTERACTIVE, HOPELESS))


def test_a_late_request_does_not_precede_others_on_workers() -> None:
    async def script(scene: Scene) -> None:
        await fill(scene, PATIENT)
        records = [scene.ask(PATIENT)[0] for _ in range(50)]  # 5 s of work, and a target of 1 s
        await asyncio.sleep(20)
        last = records[-1]
        dispatched_s = last.request.timeline.events[Event.DISPATCHED]
        assert dispatched_s > last.received_s + 4 * PATIENT.ttft_s
        fresh = scene.record(PATIENT).queue_priority
        assert last.queue_priority.key(dispatched_s) > fresh.key(dispatched_s)
        assert last.queue_priority.key(dispatched_s + 4 * PATIENT.ttft_s) < fresh.key(
            dispatched_s
        )  # nor does it starve
        in_time = records[0].queue_priority
        assert in_time.priority == PATIENT.priority

    play(script, classes=(PATIENT,))


def test_a_request_is_booked_with_the_priority_of_its_forecast() -> None:
    async def script(scene: Scene) -> None:
        forecast, book = scene.cluster.forecast, scene.cluster.book
        last: dict[str, QueuePriority] = {}
        booked: list[RequestRecord] = []
        surprised: list[RequestRecord] = []

        def noted(record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
            last[record.request.request_id] = record.queue_priority
            return forecast(record, preferred)

        def compared(record: RequestRecord, decision: RouteDecision) -> FakePlacement:
            surprised.extend([record] * (record.queue_priority != last[record.request.request_id]))
            booked.append(record)
            return book(record, decision)

        scene.cluster.forecast, scene.cluster.book = noted, compared  # type: ignore[method-assign]
        await scene.admission.admit(scene.record(PATIENT))
        await asyncio.sleep(2 * PROMPT_MS / 1e3)
        await scene.admission.admit(scene.record(HOPELESS))  # lost as it comes
        await asyncio.sleep(10)
        await fill(scene, PATIENT)
        for _ in range(50):  # many of them are lost while they wait
            scene.ask(PATIENT)
        await asyncio.sleep(20)
        assert surprised == []
        for slo in (PATIENT, HOPELESS):
            assert slo.priority - 1 in {one.queue_priority.priority for one in booked if one.request.slo is slo}

    play(script, classes=(PATIENT, HOPELESS))


def test_disabled_admission_accepts_everything() -> None:
    async def script(scene: Scene) -> None:
        for _ in range(200):
            await scene.admission.admit(scene.record(INTERACTIVE))
        assert len(scene.cluster.booked) == 200

    play(script, config=AdmissionConfig(mode="off"))


def test_misses_increase_the_margin() -> None:
    async def script(scene: Scene) -> None:
        scene.cluster.optimism = 1.6  # everything takes longer than predicted
        before = scene.admission.status()["standard"]["ttft_margin"]
        records = []
        for _ in range(1500):
            record, task = scene.ask(SHORT)
            await asyncio.sleep(PROMPT_MS / 3e3)
            if task.done() and task.exception() is None:
                records.append(record)
        assert scene.admission.status()["standard"]["ttft_margin"] > before
        await asyncio.sleep(20)
        late = records[len(records) // 2 :]
        kept = [(record.timeline.ttft_ms or 0.0) <= SHORT.ttft_s * 1e3 for record in late]
        assert sum(kept) / len(kept) >= 0.9

    play(script, classes=(SHORT,))


def test_margins_do_not_refuse_requests_on_slow_hardware() -> None:
    async def script(scene: Scene) -> None:
        for _ in range(200):  # nothing but misses of a target that cannot be kept
            placement = await scene.admission.admit(scene.record(slow))
            await asyncio.sleep(PROMPT_MS / 1e3 + OUTPUT_TOKENS)
            assert placement.num_releases == 1
        assert scene.admission.status()["slow"]["ttft_margin"] == pytest.approx(1.0, abs=0.2)

    slow = SloClass("slow", 0.05, 0.001, percentile=95.0, priority=2, queue_deadline_s=0.0)
    play(script, classes=(slow,))
