"""Several routers before the same workers, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.core.request import SamplingParams
from baton.core.roles import DECODE
from baton.core.slo import STANDARD
from cluster.config.config import BatonConfig
from cluster.simulation.control_plane import VirtualControlPlane
from cluster.simulation.sending import Answer, send
from cluster.simulation.virtual_loop import run_virtually
from tests.simulated import make_profile, prompt

SEATS = 4
NUM_REQUESTS = 60


def config(num_routers: int) -> BatonConfig:
    sections: dict[str, Any] = {
        "router": {"replicas": num_routers},
        "prefill": {"workers": 1},
        "decode": {"workers": 2, "kv_blocks": 512, "max_num_seqs": SEATS},
        "autoscaler": {"enabled": False},
    }
    return BatonConfig.from_dict(sections)


def test_routers_that_wait_for_the_same_places_book_each_once() -> None:
    async def run() -> int:
        plane = VirtualControlPlane(config(2), make_profile(), poll_s=1.0)
        await plane.start()
        await asyncio.sleep(1.0)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                await asyncio.sleep(0.002)
                decode = [worker.engine for worker in plane.cluster.workers if worker.settings.pool == DECODE]
                most = max(most, *(engine.num_running + engine.num_waiting for engine in decode))

        async def request(number: int) -> None:
            await asyncio.sleep(number * 0.013)
            answer = await ask(plane, number % 2, f"r{number}", number, max_tokens=20 + number * 7 % 40)
            assert answer.error is None

        watching = asyncio.create_task(watch())
        await asyncio.gather(*map(request, range(NUM_REQUESTS)))
        watching.cancel()
        await plane.stop()
        return most

    assert run_virtually(run) == SEATS


def test_the_same_request_id_on_two_routers_is_two_requests() -> None:
    """A client that sends an id again, such as after a broken connection, may reach another router."""

    async def run() -> list[str]:
        plane = VirtualControlPlane(config(2), make_profile(), poll_s=1.0)
        await plane.start()
        first, second = (asyncio.create_task(ask(plane, index, "same", index, max_tokens=50)) for index in (0, 1))
        await asyncio.sleep(0.1)
        both = [worker.engine.num_running for worker in plane.cluster.workers if worker.settings.pool == DECODE]
        assert sum(both) == 2
        first.cancel()
        answer = await second
        assert (answer.error, answer.num_tokens) == (None, 50)
        await plane.stop()
        await asyncio.sleep(60.0)
        return plane.cluster.leaks()

    assert run_virtually(run) == []


async def ask(plane: VirtualControlPlane, router: int, request_id: str, number: int, max_tokens: int) -> Answer:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return await send(plane.routers[router], request_id, tuple(prompt(60 + number % 30, number)), params, STANDARD)
