"""Feeds the model with the step costs that workers report, and saves those of each kind of worker."""

from __future__ import annotations

import asyncio
import logging
import time

from baton.core.errors import BatonError
from baton.rpc.step_cost_messages import unpack_step_costs
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.latency.store import FitStore
from cluster.registry.workers import Worker, WorkerInfo, WorkerRegistry

logger = logging.getLogger(__name__)

POLL_S = 1.0
_SPREAD = 0.9
"""Share of the interval over which the polls of workers are spread."""
_SAVE_EVERY_S = 60.0
_TIMEOUT_S = 2.0


class StepCostFeed:
    """Polls every added worker for its step costs once a second.

    Args:
        store: ``None`` disables loading and saving of fits.
    """

    def __init__(self, registry: WorkerRegistry, model: LatencyModel, store: FitStore | None = None) -> None:
        self._registry = registry
        self._model = model
        self._store = store
        self._known: set[str] = set()
        """All workers that the model knows."""
        self._asking: set[Worker] = set()
        self._kinds: set[tuple[str, ...]] = set()
        self._save_due_s = time.monotonic() + _SAVE_EVERY_S

    async def add(self, worker: Worker) -> None:
        """Adds a worker, with the fit of an earlier run as its prior, and polls it."""
        traits = traits_of(worker.info)
        prior = () if self._store is None else await asyncio.to_thread(self._store.load, traits.kind)
        if self._registry.get(worker.info.worker_id) is not worker:
            return  # it left while the file was read
        self._kinds.add(traits.kind)
        self._model.add_worker(worker.info.worker_id, traits, prior)
        self._known.add(worker.info.worker_id)
        await self._poll_one(worker)

    def remove(self, worker_id: str) -> None:
        self._known.discard(worker_id)
        self._model.remove_worker(worker_id)

    async def run(self) -> None:
        """Polls and saves until cancelled."""
        while True:
            await asyncio.sleep((1 - _SPREAD) * POLL_S)
            try:
                await self.poll(_SPREAD * POLL_S)
                if time.monotonic() >= self._save_due_s:
                    await self.save()
            except Exception:  # predictions become stale, but requests go on
                logger.exception("a round of step costs failed; the next one starts from scratch")

    async def poll(self, over_s: float = 0.0) -> None:
        """Polls all workers once.

        Args:
            over_s: seconds over which the polls are spread.
        """
        workers = [worker for worker in self._registry.workers if worker.info.worker_id in self._known]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(self._poll_one(worker))
                await asyncio.sleep(over_s / len(workers))

    async def save(self) -> None:
        """Saves the fit of every kind of worker."""
        self._save_due_s = time.monotonic() + _SAVE_EVERY_S
        if self._store is None:
            return
        for kind in tuple(self._kinds):  # workers of another kind may come while files are written
            coefficients = self._model.coefficients(kind)
            if coefficients is not None:
                await asyncio.to_thread(self._store.save, kind, coefficients)

    async def _poll_one(self, worker: Worker) -> None:
        worker_id = worker.info.worker_id
        if worker in self._asking or worker_id not in self._known:
            return  # a slow worker is not asked again before it has answered
        self._asking.add(worker)
        try:
            stats = await worker.client.stats(_TIMEOUT_S)
        except BatonError as error:
            logger.debug("a worker gave no step costs: %s", error.message, extra={"worker": worker_id})
            return
        finally:
            self._asking.discard(worker)
        if self._registry.get(worker_id) is worker and worker_id in self._known and stats.HasField("step_costs"):
            try:
                self._model.update_worker(worker_id, unpack_step_costs(stats.step_costs))
            except ValueError as error:
                logger.warning("the step costs of a worker are ignored: %s", error, extra={"worker": worker_id})


def traits_of(info: WorkerInfo) -> WorkerTraits:
    """The traits of a worker that the model depends on."""
    kind = (info.kv_fingerprint, info.pool, info.device, info.dtype, str(info.num_ranks), str(info.num_threads))
    return WorkerTraits(kind, info.chunk_tokens)
