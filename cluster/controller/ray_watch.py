"""Shows `baton up` whether Ray's control store, and the raylet of this node, answer."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

import ray

from baton.core.errors import WorkerLostError
from cluster.losses.ray_part_watch import RayPartWatch, Reply, ask_part, gcs_part, raylet_part


class RayWatch:
    """Asks them in a thread of its own, since calls of Ray may wait for what hangs.

    Args:
        gcs: ``host:port`` of the control store.
        raylet: ``host:port`` of the raylet.
        report: called by :meth:`look` with lines for people.

    Attributes:
        gcs: ``host:port`` of the control store.
    """

    def __init__(self, gcs: str, raylet: str, report: Callable[[str], None]) -> None:
        self.gcs = gcs
        self._report = report
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._end: WorkerLostError | None = None
        parts = (gcs_part(gcs), raylet_part(raylet))
        self._watches = [RayPartWatch(part, self._lines.put, self._must_end) for part in parts]
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_node(cls, report: Callable[[str], None]) -> RayWatch:
        """Watches what this process is connected to."""
        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        return cls(context.gcs_address, f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", report)

    @property
    def is_in_doubt(self) -> bool:
        """Whether one of them does not answer. If the controller is silent, it may be waiting for that one."""
        return any(watch.is_in_doubt for watch in self._watches)

    def look(self) -> None:
        """Reports what is new. Raises :class:`WorkerLostError` if the cluster must end."""
        while not self._lines.empty():
            self._report(self._lines.get())
        if self._end is not None:
            raise self._end

    def ask_gcs(self) -> Reply:
        """How the control store answers now."""
        return asyncio.run_coroutine_threadsafe(ask_part(self.gcs), self._loop).result()

    def close(self) -> None:
        """Ends the thread. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _must_end(self, error: WorkerLostError) -> None:
        self._end = error

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._watch())

    async def _watch(self) -> None:
        looking = [asyncio.create_task(watch.run()) for watch in self._watches]
        await self._closing.wait()
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
