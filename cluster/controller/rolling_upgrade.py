"""Replaces the workers of pools by others with a new configuration, one at a time, while requests run.

    every pool: one worker more ── ready ── drain an outdated worker of one pool ── gone ── again, until none is left

So each pool keeps its size, and while outdated workers are left in several pools, each of them has outdated and new
ones: routers pair only workers with equal KV layouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from baton.core.errors import BatonError
from cluster.config.config import BatonConfig
from cluster.config.key_changes import worker_keys
from cluster.controller.shared_processes import simulated_processes
from cluster.controller.worker_agreement import WorkerAgreement
from cluster.controller.worker_pool import WorkerPool

_TRIES = 2
"""Starts of a worker before the upgrade has failed: one may meet a bad node, or a moment without memory."""


class UpgradeError(BatonError):
    """An upgrade has failed; the message includes its cause, and what the cluster runs now."""

    code = "upgrade_failed"


class RollingUpgrade:
    """Gives pools another configuration, or their old one if workers do not start with it.

    Args:
        pools: all pools, by name.
        agreement: what ready workers are checked against.
        secret: the cluster's secret.
        report: called with lines of progress.
    """

    def __init__(
        self,
        pools: Mapping[str, WorkerPool],
        agreement: WorkerAgreement,
        secret: bytes,
        report: Callable[[str], None],
    ) -> None:
        self._pools = pools
        self._agreement = agreement
        self._secret = secret
        self._report = report

    async def run(self, old: BatonConfig, new: BatonConfig, finish: Callable[[], Awaitable[None]]) -> None:
        """Replaces the workers whose settings differ in ``new``; goes back to ``old`` if one does not become ready.

        Args:
            finish: called when all are replaced; the upgrade fails if it raises ``BatonError``.

        Raises:
            UpgradeError: it failed; all workers have the old settings again, or the message says which ones do not.
        """
        before = self._agreement.kv_fingerprint
        self._use(new)
        if all(worker_keys(old, new, name) for name in self._pools):
            self._agreement.kv_fingerprint = None  # the first new worker decides
        try:
            await self.replace_outdated(new.ray.start_timeout_s)
            await finish()
        except BatonError as error:
            self._report(f"the upgrade has failed, and the old settings are restored: {error.message}")
            self._agreement.kv_fingerprint = before
            raise UpgradeError(f"The upgrade has failed: {error.message}\n{await self._undo(old)}") from error

    async def replace_outdated(self, timeout_s: float) -> None:
        """Replaces workers until none has other settings than its pool now has.

        Args:
            timeout_s: time limit for each worker to be ready.

        Raises:
            BatonError: a worker does not become ready; nothing is replaced any more. The pools that still have
                outdated workers keep a spare one until :meth:`WorkerPool.use` or :meth:`WorkerPool.keep_spare`.
        """
        await self._all_drained()
        while left := {name: pool.outdated for name, pool in self._pools.items() if pool.outdated}:
            for name in left:
                self._pools[name].keep_spare(1)
            await _all_ready([self._pools[name] for name in left], timeout_s)
            name = max(left, key=lambda name: len(left[name]))
            self._report(f"{name}: replacing the next of {len(left[name])} workers with old settings")
            self._pools[name].keep_spare(0)
            await self._all_drained()

    async def _all_drained(self) -> None:
        await asyncio.gather(*(pool.wait_until_drained() for pool in self._pools.values()))

    def _use(self, config: BatonConfig) -> None:
        processes = simulated_processes(config, self._secret)
        for pool in self._pools.values():
            pool.use(config, processes)

    async def _undo(self, old: BatonConfig) -> str:
        """Restores the old configuration, and says in a sentence what the cluster runs now."""
        self._use(old)
        try:
            await self.replace_outdated(old.ray.start_timeout_s)
        except BatonError as error:
            for pool in self._pools.values():
                pool.keep_spare(0)
            left = ", ".join(member.worker_id for pool in self._pools.values() for member in pool.outdated)
            return (
                f"The old settings could not be restored everywhere: {error.message}\nThese workers still run with "
                f"the new ones: {left or 'none'}. Others are started with the old ones as soon as that is possible."
            )
        return "All workers run with the old settings again."


async def _all_ready(pools: list[WorkerPool], timeout_s: float) -> None:
    waits = [asyncio.create_task(pool.wait_until_ready(timeout_s, max_failed_rounds=_TRIES)) for pool in pools]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
