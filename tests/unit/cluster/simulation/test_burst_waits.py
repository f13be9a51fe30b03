"""How long a refused request is told to wait behind a burst, and when the burst is really over. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import OverloadedError
from baton.core.request import SamplingParams
from cluster.config.config import BatonConfig
from cluster.simulation.control_plane import VirtualControlPlane
from cluster.simulation.sending import Answer, send
from cluster.simulation.virtual_loop import run_virtually
from tests.simulated import STEP, make_profile

BURST = 200
CONFIG = {
    "prefill": {"workers": 1},
    "decode": {"workers": 1},
    "slo": {"classes": {"last": {"ttft": "3s", "tpot": "100ms", "priority": 0, "queue_deadline": "0s"}}},
}
SLOW_STEPS = make_profile(kv_tokens=400_000, step=STEP.model_copy(update={"fixed": 60.0}))


def burst_s(before: int, before_tokens: int, tokens: int) -> tuple[float, float]:
    """Sends some requests one after the other, then a burst, and behind it a request that may not wait.

    Returns:
        Seconds that the last one was told to wait, and those that the burst took.
    """

    async def run() -> tuple[float, float]:
        config, loop = BatonConfig.from_dict(CONFIG), asyncio.get_running_loop()
        plane = VirtualControlPlane(config, SLOW_STEPS, 5.0)
        await plane.start()
        classes = {slo.name: slo for slo in config.slo.to_classes().all}

        async def ask(number: int, max_tokens: int, slo: str = "standard") -> Answer:
            prompt = [(number * 7 + position * 13 + number * position) % 900 + 3 for position in range(100)]
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            return await send(plane.routers[0], f"r{number}", prompt, params, classes[slo])

        for number in range(before):
            await ask(number, before_tokens)
        began_s = loop.time()
        burst = [asyncio.create_task(ask(before + number, tokens)) for number in range(BURST)]
        await asyncio.sleep(0)
        last = await ask(before + BURST, tokens, "last")
        assert isinstance(last.error, OverloadedError)
        assert last.error.predicted_wait_s is not None
        answers = await asyncio.gather(*burst)
        took_s = loop.time() - began_s
        await plane.stop()
        assert [answer.error for answer in answers] == [None] * BURST
        return last.error.predicted_wait_s, took_s

    return run_virtually(run)


@pytest.mark.parametrize(
    ("before", "before_tokens"),
    [
        pytest.param(0, 0, id="no answer has ended yet"),
        pytest.param(3, 32, id="after answers of the same length"),
        pytest.param(2, 600, id="after long answers"),
    ],
)
def test_the_wait_behind_a_burst_is_predicted_within_a_factor_of_two(before: int, before_tokens: int) -> None:
    told_s, took_s = burst_s(before, before_tokens, tokens=32)
    assert took_s / 2 < told_s < 2 * took_s
