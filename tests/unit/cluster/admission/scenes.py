"""Scenes in virtual time: classes with various targets, and a cluster that is filled up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.core.slo import SloClass
from cluster.simulation.virtual_loop import run_virtually
from tests.unit.cluster.admission.fake_cluster import FakePlacement, Scene

USUAL = SloClass("standard", ttft_s=3.0, tpot_s=0.1, percentile=95.0, priority=1, queue_deadline_s=15.0)
PATIENT = SloClass("patient", ttft_s=1.0, tpot_s=0.5, percentile=95.0, priority=2, queue_deadline_s=60.0)
TIGHT = SloClass("tight", ttft_s=60.0, tpot_s=0.012, percentile=95.0, priority=1, queue_deadline_s=0.0)
LAX = SloClass("lax", ttft_s=60.0, tpot_s=1.0, percentile=95.0, priority=0, queue_deadline_s=0.0)
SHORT = SloClass("standard", ttft_s=2.0, tpot_s=0.5, percentile=95.0, priority=1, queue_deadline_s=0.0)
MODEST = SloClass("modest", ttft_s=1.0, tpot_s=0.5, percentile=95.0, priority=0, queue_deadline_s=600.0)


def play(script: Callable[[Scene], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        scene = Scene(asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        try:
            await script(scene)
        finally:
            scene.admission.close()

    run_virtually(main)


async def fill(scene: Scene, slo: SloClass) -> list[asyncio.Task[FakePlacement]]:
    """Sends requests of a class until the next one has no room."""
    tasks = []
    while True:
        _, task = scene.ask(slo)
        await asyncio.sleep(0)
        if not task.done() or task.exception() is not None:
            task.cancel()
            return tasks
        tasks.append(task)
