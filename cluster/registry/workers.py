"""The router's table of workers: their description, load and availability."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from baton.core.errors import BatonError
from baton.core.memory_budget import MemoryBudget
from baton.core.roles import POOLS
from cluster.registry.progress_judge import Standing
from cluster.registry.worker_client import WorkerClient

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 16.0
_FAILURES_BEFORE_PAUSE = 3


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECTED = "suspected"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's description of itself when it is ready.

    Attributes:
        address: address of its gRPC server, ``host:port``.
        peer_proof: :meth:`baton.rpc.credentials.ClusterSecret.peer_proof` of the address.
        kv_fingerprint: fingerprint of its KV layout; equal across both pools.
        draft_method: the speculation method of its draft; empty without a draft.
        device: what each of its ranks computes on.
        num_ranks: processes among which it divides the model.
        num_threads: threads of each; 0 if unknown.
        chunk_tokens: token budget of one of its steps.
        max_num_seqs: largest number of sequences in one of its steps.
        kv_blocks: size of its KV cache in blocks; 0 if unknown.
        memory: the budget of its memory; ``None`` if unknown.
        node_id: id of its node in Ray; empty if unknown.
        graph_failure: why it runs every step eagerly although CUDA graphs were configured; empty otherwise.
    """

    worker_id: str
    pool: str
    address: str
    peer_proof: str
    node: str
    pid: int
    device: str
    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_fingerprint: str
    kv_bytes_per_token: int
    block_size: int
    dtype: str
    draft_method: str
    num_ranks: int = 1
    num_threads: int = 0
    chunk_tokens: int = 512
    max_num_seqs: int = 64
    kv_blocks: int = 0
    memory: MemoryBudget | None = None
    node_id: str = ""
    graph_failure: str = ""

    @property
    def hardware(self) -> str:
        """The devices of all ranks, for people."""
        return self.device if self.num_ranks == 1 else f"{self.num_ranks} x {self.device}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WorkerInfo:
        memory = values.get("memory")
        return cls(
            **{
                **values,
                "eos_token_ids": tuple(values["eos_token_ids"]),
                "memory": None if memory is None else MemoryBudget(**memory),
            }
        )


@dataclass(slots=True, eq=False)
class Worker:
    """A worker in the router's table.

    Attributes:
        suspicion: why the worker probably hangs or is gone; empty while it is trusted.
        paused_until_s: it gets no requests until then, because it answers and fails them.
    """

    info: WorkerInfo
    client: WorkerClient
    draining: bool = False
    in_flight: int = 0
    assigned: int = 0
    last_assigned_s: float = float("-inf")
    suspicion: str = ""
    paused_until_s: float = 0.0
    failures_in_a_row: int = 0
    clock: Callable[[], float] = time.monotonic
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self) -> None:
        """Counts one more request on this worker, until :meth:`end`."""
        self.in_flight += 1
        self.assigned += 1
        self.last_assigned_s = self.clock()
        self.idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()

    def failed(self) -> None:
        """Counts a request that failed here and succeeded on another worker.

        A worker that fails at once is always the least loaded one, so it would attract every request. After a few
        failures in a row it gets no requests for a while, and for twice as long after each further one. Failures
        during that time, or of a suspected worker, are requests sent before, and do not count.
        """
        if self.suspicion or self.clock() < self.paused_until_s:
            return
        self.failures_in_a_row += 1
        excess = self.failures_in_a_row - _FAILURES_BEFORE_PAUSE
        if excess < 0:
            return
        pause_s = min(_PAUSE_S * 2.0 ** min(excess, 8), _LONGEST_PAUSE_S)
        self.paused_until_s = max(self.paused_until_s, self.clock() + pause_s)
        logger.warning(
            "a worker failed %d requests in a row that succeeded elsewhere; it gets none for %g s",
            self.failures_in_a_row,
            pause_s,
            extra={"worker": self.info.worker_id},
        )

    def succeeded(self) -> None:
        """Counts a request that succeeded here, which ends a row of failures."""
        self.failures_in_a_row = 0

    async def sync_clock(self) -> None:
        """Measures the worker's clock; a worker that does not answer keeps its old offset."""
        try:
            await self.client.sync_clock()
        except BatonError as error:
            logger.warning("a worker did not answer a ping: %s", error.message, extra={"worker": self.info.worker_id})

    @property
    def is_accepting(self) -> bool:
        """Whether the worker may get new requests."""
        return not self.draining and not self.suspicion and self.clock() >= self.paused_until_s


class WorkerRegistry:
    """Workers by id. ``changed`` is replaced and set on every change, so that waiters never miss a change.

    Streams of a suspected worker are cut off, so that they continue elsewhere, as soon as another worker of its pool
    accepts requests. Otherwise they stay: it may recover, and nothing else can continue them.

    Args:
        connect: creates the client of an address.

    Attributes:
        num_suspicions: how often a worker was suspected, by pool.
    """

    def __init__(
        self,
        connect: Callable[[str], WorkerClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._changed = asyncio.Event()
        self.num_suspicions = dict.fromkeys(POOLS, 0)

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change. Take it before reading the table."""
        return self._changed

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def pool(self, pool: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.info.pool == pool]

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def add(self, info: WorkerInfo) -> Worker:
        """Adds a worker. Idempotent."""
        if (known := self._workers.get(info.worker_id)) is not None:
            return known
        worker = Worker(info, self._connect(info.address), clock=self._clock)
        self._workers[info.worker_id] = worker
        self._notify()
        return worker

    def drain(self, worker_id: str) -> Worker | None:
        """Stops new requests to a worker. Returns ``None`` if it is unknown."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.draining = True
            self._notify()
        return worker

    def judged(self, worker_id: str, standing: Standing, reason: str) -> None:
        """Takes a judgement of a :class:`ProgressWatch`. Unknown workers are ignored."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if standing is Standing.SUSPECTED:
            self.num_suspicions[worker.info.pool] += 1
        worker.suspicion = reason
        if not reason:
            worker.client.resume()
        self._notify()

    async def remove(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._notify()
            await worker.client.close()

    def has_accepting(self, pool: str) -> bool:
        return any(worker.is_accepting for worker in self.pool(pool))

    def has_untried(self, pool: str, tried: Container[str]) -> bool:
        """Whether a worker of the pool takes requests whose id is not among ``tried``."""
        return any(worker.is_accepting and worker.info.worker_id not in tried for worker in self.pool(pool))

    def _cut_off_suspects(self) -> None:
        for worker in self._workers.values():
            if worker.suspicion and not worker.client.is_suspended and self.has_accepting(worker.info.pool):
                worker.client.suspend(worker.suspicion)

    def _notify(self) -> None:
        self._cut_off_suspects()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
