"""The router during an upgrade: requests are handed over and continued only between workers with equal KV layouts."""

from __future__ import annotations

import pytest

from baton.core.errors import BatonError
from cluster.config.router_config import RouterConfig
from tests.fake_workers import FakeCluster, death, decode_some, expected_tokens
from tests.waiting import until


async def test_handoffs_stay_within_a_layout() -> None:
    async with FakeCluster() as cluster:
        workers = [await cluster.add(f"{pool}-{layout}", layout=layout) for layout in ("old", "new") for pool in "pd"]
        for _ in range(8):
            assert await cluster.run() == expected_tokens(6)
        peers = {worker.address: worker for worker in workers}
        for prefill in (workers[0], workers[2]):
            assert {peers[request.handoff.peer].worker_id[1:] for request in prefill.requests} <= {
                prefill.worker_id[1:]
            }
        assert sum(len(worker.requests) for worker in workers[::2]) == 8
        await until(lambda: cluster.is_idle)


@pytest.mark.parametrize("others", [("new",), ("new", "old")])
async def test_a_stream_is_continued_only_by_the_layout_that_began_it(others: tuple[str, ...]) -> None:
    async with FakeCluster(RouterConfig(worker_wait_s=0.2)) as cluster:
        await cluster.add("p-old", layout="old")
        dying = await cluster.add("d-old", layout="old")
        dying.scripts = [decode_some(2, death)]
        received: list[int] = []
        more = []
        with_old = "old" in others
        try:
            async for chunk in cluster.stream():
                received += chunk.token_ids
                if not more:
                    more = [await cluster.add(f"d-{layout}-2", layout=layout) for layout in others]
        except BatonError:
            assert not with_old
        assert received == expected_tokens(6)[: len(received)]
        assert (len(received) == 6) == with_old
        assert more[0].requests == [], "another model would have continued the answer"
        await until(lambda: cluster.router.num_in_flight == 0)
