"""The end of the raylet that has started this process."""

from __future__ import annotations

import asyncio

from cluster.losses.raylet_watch import PID_VARIABLE, raylet_ends

VARIABLES = {PID_VARIABLE: "77"}


async def test_the_end_of_the_raylet_is_noticed_by_the_new_parent() -> None:
    parents = iter([77, 77, 77, 1])
    await raylet_ends(VARIABLES, lambda: next(parents), look_every_s=0.0)
    assert next(parents, None) is None


async def test_another_parent_is_no_raylet() -> None:
    for variables in ({}, VARIABLES):
        parents = iter([5, 1])
        watching = asyncio.create_task(raylet_ends(variables, lambda parents=parents: next(parents), look_every_s=0.0))
        await asyncio.sleep(0.01)
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
