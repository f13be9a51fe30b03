"""What a router tells operators and scrapes: the state of the cluster, over all routers and workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from heapq import merge
from itertools import islice
from typing import Any

from ray.exceptions import RayError

from baton.core.errors import BatonError, InvalidRequestError, NotFoundError
from baton.core.roles import POOLS
from baton.explain.timelines import Order, TimelineStore
from baton.rpc.wire import worker_pb2
from cluster.autoscaling.traffic import KnownTraffic
from cluster.control_plane import ControlPlane
from cluster.dispatch.router import Router
from cluster.jobs.jobs import Jobs
from cluster.losses.controller_link import ControllerLink
from cluster.registry.workers import WorkerState
from cluster.router_process.router_peers import Question, RouterPeers
from cluster.telemetry.cluster_metrics import ClusterFigures, PoolFigures
from cluster.telemetry.job_figures import JobFigures
from cluster.telemetry.metrics import MetricsPage
from cluster.telemetry.speculation_report import speculation_advice, speculation_report
from cluster.telemetry.traffic_recorder import RecordedRequest, mooncake_requests

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 2.0
_NO_COUNTS = {"in_flight": 0, "finished": 0, "cancelled": 0, "rejected": 0, "failed": 0}


class RouterAdmin:
    """Implements :class:`cluster.gateway.gateway.AdminBackend`, and answers the questions of other routers.

    Args:
        index: of this router.
        controller: owner of the pools.

    Attributes:
        router: the router, once there is a worker.
        jobs: files and batches; ``None`` if they are disabled.
    """

    def __init__(
        self,
        index: int,
        controller: ControllerLink,
        plane: ControlPlane,
        timelines: TimelineStore,
        peers: RouterPeers,
    ) -> None:
        self.router: Router | None = None
        self.jobs: Jobs | None = None
        self._index = index
        self._controller = controller
        self._plane = plane
        self._timelines = timelines
        self._peers = peers
        self._metrics_page = MetricsPage(plane.metrics, self._poll_cluster, self._poll_routers, index)
        self._started_s = time.monotonic()

    async def answer(self, question: Question, *arguments: Any) -> Any:
        """Answers another router for this one alone."""
        answers: Mapping[Question, Callable[..., Awaitable[Any]]] = {
            Question.TIMELINE: self._own_timeline,
            Question.REQUESTS: self._own_requests,
            Question.COUNTS: self._own_counts,
            Question.METRICS: self._own_metrics,
            Question.TRAFFIC: self._own_traffic,
            Question.PLAN: self._plane.autoscaler.look,
            Question.ADVISE: self._plane.autoscaler.advise,
            Question.RECORDED: self._own_recorded,
        }
        return await answers[question](*arguments)

    async def status(self) -> dict[str, Any]:
        pools: dict[str, Any] = await self._controller.call("pool_status")
        stats, others, own = await asyncio.gather(
            self._poll_workers(), self._peers.ask(Question.COUNTS), self._own_counts()
        )
        for pool in POOLS:
            for entry in pools[pool]["workers"]:
                self._add_live_figures(entry, stats.get((pool, entry["id"])))
        router, plane = self.router, self._plane
        counts = dict(sorted({self._index: own, **others}.items()))
        status: dict[str, Any] = {
            "model": router.model.name if router else None,
            "max_model_len": router.model.max_model_len if router else None,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "requests": {name: sum(each[name] for each in counts.values()) for name in _NO_COUNTS},
            "slo": plane.metrics.slo.status(),
            "admission": plane.admission.status(),
            "predictions": plane.metrics.prediction_errors.summary(),
            "pools": pools,
        }
        if (jobs := self._job_figures()) is not None:
            status["jobs"] = jobs.to_dict()
        if self._peers.indices:
            status["router"] = self._index
            indices = sorted({*counts, *self._peers.indices})
            status["routers"] = [{"index": index, "requests": counts.get(index)} for index in indices]
        return status

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        return {"pools": await self._controller.call("scale", targets)}

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        return {"pools": await self._controller.call("change_role", source, destination)}

    async def plan(self) -> dict[str, Any]:
        return await self._as_leader(Question.PLAN)

    async def advise(self) -> dict[str, Any]:
        advice, workers = await asyncio.gather(self._as_leader(Question.ADVISE), self._poll_workers())
        drafts = [
            entry
            for (_, worker_id), stats in workers.items()
            if stats is not None
            for entry in speculation_advice(worker_id, stats)
        ]
        return {**advice, "speculation": drafts}

    async def trace(self) -> list[dict[str, Any]]:
        recorded = await self._own_recorded()
        for others in (await self._peers.ask(Question.RECORDED)).values():
            recorded += others
        return await asyncio.to_thread(mooncake_requests, recorded)

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any]:
        try:
            return self._timelines.find(request_id, owner)
        except NotFoundError:
            for found in (await self._peers.ask(Question.TIMELINE, request_id, owner)).values():
                if found is not None:
                    timeline: dict[str, Any] = found
                    return timeline
            raise

    async def requests(self, order: Order, limit: int) -> list[dict[str, Any]]:
        ranked = [self._timelines.ranked(order, limit)]
        ranked += (await self._peers.ask(Question.REQUESTS, order, limit)).values()
        best = merge(*ranked, key=lambda pair: pair[0], reverse=True)
        return [entry for _, entry in islice(best, limit)]

    async def metrics(self) -> bytes:
        return await self._metrics_page.get()

    async def other_traffic(self) -> list[KnownTraffic]:
        """The traffic of the other routers, for the autoscaler."""
        return list((await self._peers.ask(Question.TRAFFIC)).values())

    async def _as_leader(self, question: Question) -> dict[str, Any]:
        """The leader's answer, or this router's own if there is no other."""
        found: dict[str, Any] = await self._peers.ask_leader(question) or await self.answer(question)
        return found

    async def _own_timeline(self, request_id: str, owner: str | None) -> dict[str, Any] | None:
        try:
            return self._timelines.find(request_id, owner)
        except NotFoundError:
            return None

    async def _own_requests(self, order: Order, limit: int) -> list[tuple[float, dict[str, Any]]]:
        return self._timelines.ranked(order, limit)

    async def _own_recorded(self) -> list[RecordedRequest]:
        recorder = self._plane.recorder
        if recorder is None:
            raise InvalidRequestError(
                "This cluster does not record its traffic. Set telemetry.recorded_requests to the number of sequences "
                "to keep, such as 10000, and start the cluster again."
            )
        return recorder.recorded()

    async def _own_counts(self) -> dict[str, int]:
        router = self.router
        if router is None:
            return _NO_COUNTS
        return {name: getattr(router, f"num_{name}") for name in _NO_COUNTS}

    async def _own_metrics(self) -> list[Any]:
        return self._plane.metrics.own_families()

    async def _own_traffic(self) -> KnownTraffic:
        return self._plane.autoscaler.own_traffic()

    def _add_live_figures(self, entry: dict[str, Any], stats: worker_pb2.WorkerStats | None) -> None:
        worker = self._plane.registry.get(entry["id"])
        entry["in_flight"] = worker.in_flight if worker else 0
        if worker is not None:
            entry["max_running"] = worker.info.max_num_seqs
        if worker is not None and worker.suspicion and entry["state"] == WorkerState.READY:
            entry.update(state=str(WorkerState.SUSPECTED), reason=worker.suspicion)
        if stats is not None:
            entry.update(
                running=stats.num_running,
                waiting=stats.num_waiting,
                transfers=stats.num_transfers,
                kv_blocks_total=stats.kv_blocks_total,
                kv_blocks_used=stats.kv_blocks_used,
                kv_blocks_cached=stats.kv_blocks_cached,
                kv_blocks_leaked=stats.num_leaked_blocks,
                preemptions=stats.num_preemptions,
                steps=stats.num_steps,
            )
            if (report := speculation_report(stats)) is not None:
                entry["speculation"] = report

    async def _poll_routers(self) -> dict[int, list[Any]]:
        """The metrics of the other routers, by index."""
        return await self._peers.ask(Question.METRICS)

    async def _poll_cluster(self) -> ClusterFigures:
        workers, answer = await asyncio.gather(self._poll_workers(), self._poll_controller())
        pools, num_router_restarts = answer or ({}, None)
        suspicions = dict(self._plane.registry.num_suspicions)
        return ClusterFigures(workers, pools, num_router_restarts, suspicions, self._job_figures() or JobFigures())

    def _job_figures(self) -> JobFigures | None:
        return None if self.jobs is None else self.jobs.figures

    async def _poll_controller(self) -> tuple[dict[str, PoolFigures], int] | None:
        """The controller's figures; ``None`` if it does not answer, since requests do not depend on it."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                figures: tuple[dict[str, PoolFigures], int] = await self._controller.call("figures")
                return figures
        except (BatonError, RayError, TimeoutError) as error:
            logger.warning("the controller did not answer a scrape: %s", error)
            return None

    async def _poll_workers(self) -> dict[tuple[str, str], worker_pb2.WorkerStats | None]:
        """The statistics of every worker; ``None`` for a worker that does not answer."""
        workers = self._plane.registry.workers
        results = await asyncio.gather(
            *(worker.client.stats(_STATS_TIMEOUT_S) for worker in workers), return_exceptions=True
        )
        found: dict[tuple[str, str], worker_pb2.WorkerStats | None] = {}
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, BatonError):
                raise result
            found[worker.info.pool, worker.info.worker_id] = None if isinstance(result, BatonError) else result
        return found
