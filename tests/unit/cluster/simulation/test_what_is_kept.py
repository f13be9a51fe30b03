"""A control plane keeps nothing of workers that have left, and nothing of requests that have ended."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from itertools import count

from baton.core.request import SamplingParams
from baton.core.roles import POOLS
from baton.core.slo import STANDARD
from cluster.config.config import BatonConfig
from cluster.simulation.control_plane import VirtualControlPlane
from cluster.simulation.sending import send
from cluster.simulation.virtual_loop import run_virtually
from tests.simulated import make_profile, prompt

CONFIG = {
    "prefill": {"workers": 2, "kv_blocks": 256},
    "decode": {"workers": 2, "kv_blocks": 256},
    "admission": {"mode": "off"},
    "autoscaler": {"enabled": False},
}
FORGETTING_S = 400.0
"""After this time, requests are too old for every window of the traffic meter."""


def own_objects() -> Counter[str]:
    """Objects of the project's classes by class."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(("baton.", "cluster.")))


class Churn:
    """Rounds of requests, in each of which all workers are replaced."""

    def __init__(self) -> None:
        self.plane = VirtualControlPlane(BatonConfig.from_dict(CONFIG), make_profile(), poll_s=1.0)
        self.numbers = count()

    async def round(self) -> None:
        sending = [asyncio.create_task(self._send(next(self.numbers))) for _ in range(16)]
        await asyncio.sleep(0.1)  # some are queued, some computed, handed over or decoded
        for pool in POOLS:
            for worker in self.plane.registry.pool(pool):
                await self.plane._add_worker(pool)
                await self.plane._remove_worker(worker.info.worker_id)
        await asyncio.gather(*sending)
        await asyncio.sleep(FORGETTING_S)

    async def _send(self, number: int) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        answer = await send(self.plane.router, f"r{number}", tuple(prompt(100, number)), params, STANDARD)
        assert answer.num_tokens == 20


def test_nothing_is_kept_of_departed_workers_and_ended_requests() -> None:
    async def run() -> tuple[Counter[str], Counter[str]]:
        churn = Churn()
        await churn.plane.start()
        await churn.round()
        await churn.round()
        before = own_objects()
        for _ in range(4):
            await churn.round()
        after = own_objects()
        await churn.plane.stop()
        return before, after

    before, after = run_virtually(run)
    assert after - before == Counter()
