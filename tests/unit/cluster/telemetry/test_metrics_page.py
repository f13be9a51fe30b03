"""Concurrent scrapes share one round of requests to the workers and do not block the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.rpc.wire import worker_pb2
from cluster.telemetry.cluster_metrics import ClusterFigures
from cluster.telemetry.metrics import MetricsPage, RouterMetrics


class Cluster:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def ask(self) -> ClusterFigures:
        self.num_asked += 1
        await self.may_answer.wait()
        return ClusterFigures({("decode", f"decode-{self.num_asked}"): worker_pb2.WorkerStats()})


async def test_concurrent_scrapes_share_a_page():
    cluster = Cluster()
    page = MetricsPage(RouterMetrics(), cluster.ask)
    scrapes = [asyncio.create_task(page.get()) for _ in range(20)]
    await asyncio.sleep(0)
    cluster.may_answer.set()
    assert len(set(await asyncio.gather(*scrapes))) == 1
    assert cluster.num_asked == 1
    assert b'worker="decode-2"' in await page.get()


async def test_a_cancelled_scrape_does_not_end_the_others():
    cluster = Cluster()
    page = MetricsPage(RouterMetrics(), cluster.ask)
    given_up, other = asyncio.create_task(page.get()), asyncio.create_task(page.get())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    cluster.may_answer.set()
    assert b"baton_worker_up" in await other


async def test_the_page_is_rendered_off_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    cluster, metrics = Cluster(), RouterMetrics()
    cluster.may_answer.set()
    threads: list[int] = []
    render = metrics.render
    monkeypatch.setattr(metrics, "render", lambda *_: (threads.append(threading.get_ident()), render())[1])
    await MetricsPage(metrics, cluster.ask).get()
    assert threads != [threading.get_ident()]
    assert len(threads) == 1


async def test_the_page_of_several_routers_labels_what_each_of_them_counts():
    own, other = RouterMetrics(), RouterMetrics()
    own.retries.labels("worker_lost").inc(2)
    other.retries.labels("worker_lost").inc(5)

    async def ask_others():
        return {1: other.own_families()}

    cluster = Cluster()
    cluster.may_answer.set()
    page = (await MetricsPage(own, cluster.ask, ask_others).get()).decode()
    assert 'baton_retries_total{reason="worker_lost",router="0"} 2.0' in page
    assert 'baton_retries_total{reason="worker_lost",router="1"} 5.0' in page
    assert page.count("# TYPE baton_retries_total counter") == 1
    alone = (await MetricsPage(own, cluster.ask).get()).decode()
    assert 'baton_retries_total{reason="worker_lost"} 2.0' in alone
