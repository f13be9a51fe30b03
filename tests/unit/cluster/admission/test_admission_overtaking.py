"""Which requests may overtake late ones, and the refusals of the others."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import OverloadedError
from baton.core.slo import SloClass
from cluster.admission.admission_config import AdmissionConfig
from tests.unit.cluster.admission.fake_cluster import PROMPT_MS, Scene
from tests.unit.cluster.admission.scenes import PATIENT, USUAL, play

BRIEF = SloClass("brief", ttft_s=0.05, tpot_s=0.5, percentile=95.0, priority=5, queue_deadline_s=60.0)
"""Shorter than any prompt takes."""
QUICK = SloClass("quick", ttft_s=1.0, tpot_s=0.5, percentile=95.0, priority=2, queue_deadline_s=0.0)
LOW = SloClass("low", ttft_s=9.0, tpot_s=0.5, percentile=95.0, priority=1, queue_deadline_s=0.0)
SHORT_OF_TIME = SloClass("short", ttft_s=9.0, tpot_s=0.5, percentile=95.0, priority=2, queue_deadline_s=0.0)


def test_a_late_request_without_room_does_not_block_others() -> None:
    """Regression: while too long prompts of a strict class waited, a lower class was refused on idle workers."""

    async def script(scene: Scene) -> None:
        scene.ask(BRIEF)
        scene.cluster.fall_behind(2.0)
        late = [scene.ask(BRIEF)[1] for _ in range(3)]
        await asyncio.sleep(0.6)
        assert scene.admission.num_queued == 3
        await scene.admission.admit(scene.record(SHORT_OF_TIME))
        assert not any(task.done() for task in late)
        _, waiting = scene.ask(USUAL)  # the request may wait, and does
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.sleep(5)
        assert all(task.done() and task.exception() is None for task in late)

    play(script, classes=(BRIEF, SHORT_OF_TIME, USUAL))


def test_no_request_overtakes_a_higher_class_without_room() -> None:
    async def script(scene: Scene) -> None:
        scene.ask(BRIEF)
        scene.cluster.fall_behind(2.0)
        _, late = scene.ask(BRIEF)
        await asyncio.sleep(0.1)
        assert (await refused(scene, QUICK)).reason == "prefill"
        assert (await refused(scene, LOW)).reason == "turn"
        await asyncio.sleep(5)
        assert late.done()

    play(script, classes=(BRIEF, QUICK, LOW))


def test_overtaking_ends_when_patience_runs_out() -> None:
    async def script(scene: Scene) -> None:
        scene.ask(BRIEF)
        scene.cluster.fall_behind(2.0)
        late = scene.ask(BRIEF)[1]
        await asyncio.sleep(0.1)
        for number in range(400):  # prompts wait for two seconds all the time
            if number == 250:
                assert not late.done()
            scene.ask(SHORT_OF_TIME)
            await asyncio.sleep(PROMPT_MS / 1e3)
        assert late.done()

    play(script, classes=(BRIEF, SHORT_OF_TIME), config=AdmissionConfig(patience=30.0, fair_share=0.0))


async def refused(scene: Scene, slo: SloClass) -> OverloadedError:
    with pytest.raises(OverloadedError) as raised:
        await scene.admission.admit(scene.record(slo))
    return raised.value


def test_a_request_blocked_by_others_is_told_how_long_they_wait() -> None:
    async def script(scene: Scene) -> None:
        scene.ask(PATIENT)
        scene.cluster.fall_behind(4.0)
        scene.ask(PATIENT)  # can keep its target of a second no more; it waits for three
        await asyncio.sleep(0)
        assert scene.admission.num_queued == 1
        error = await refused(scene, SHORT_OF_TIME)
        assert error.reason == "turn"
        assert error.retry_after_s is not None
        assert 3 < error.retry_after_s < 30

    play(script, classes=(PATIENT, SHORT_OF_TIME))
