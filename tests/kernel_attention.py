"""Attention on the device of :mod:`tests.device_tensors`: one kernel that reads the block table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from engine.attention.base import AttentionBatch, AttentionVariant
from engine.attention.paged_plan import PagedPlan, PlannedBatch, make_plan
from engine.kv_cache import PagedKVCache
from tests.device_tensors import DeviceTensors, access_of, values_of
from tests.plan_attention import PlanAttention
from tests.stream_checker import Access


class KernelAttention:
    """Implements :class:`engine.attention.base.AttentionBackend`, as :class:`engine.attention.triton_paged.TritonPaged`
    does, but for what the kernel computes."""

    takes_plans = True

    def __init__(self, cache: PagedKVCache, tensors: DeviceTensors) -> None:
        self._cache = cache
        self._tensors = tensors
        self._planned: tuple[AttentionBatch, PagedPlan] | None = None

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        self._cache.write(layer, batch.slots, key, value)
        plan = self._plan_of(batch)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        self._attend(layer, query, output, plan, variant)
        return output

    def _plan_of(self, batch: AttentionBatch) -> PagedPlan:
        if isinstance(batch, PlannedBatch):
            return batch.plan
        if self._planned is None or self._planned[0] is not batch:
            spans = [span for group in batch.groups for span in group.spans]
            self._planned = (batch, make_plan(spans, self._cache.device))
        return self._planned[1]

    def _attend(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, plan: PagedPlan, variant: AttentionVariant
    ) -> None:
        tables = ("sequences", "tables", "positions", "nodes", "ancestors")
        given = [query, *(getattr(plan, name) for name in tables)]
        fixed = [*(access_of(tensor, writes=False) for tensor in given), access_of(output, writes=True)]
        on_host: list[Any] = [values_of(tensor) for tensor in (*given, output)]
        kept = [(values_of(t), access_of(t, writes=False)) for t in self._rows_of(layer)]

        def run() -> Sequence[Access]:
            accesses = list(fixed)

            def read(layer: int, slots: torch.Tensor) -> list[torch.Tensor]:
                accesses.extend(Access(access.memory, slots.numpy(), writes=False) for _, access in kept)
                return [rows.index_select(0, slots) for rows, _ in kept]

            cache: Any = SimpleNamespace(spec=self._cache.spec, read=read)
            host_plan = PagedPlan(*on_host[1:-1], segments=plan.segments)
            with torch.inference_mode():
                PlanAttention(cache).attend(layer, on_host[0], on_host[-1], host_plan, variant)
            return accesses

        self._tensors.device.launch("attend", run)

    def _rows_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer], self._cache.values[layer]
