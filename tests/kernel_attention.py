"""Attention on the fake device of :mod:`tests.device_tensors`: one kernel that reads the block table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from baton.engine.attention.base import AttentionVariant
from baton.engine.attention.paged_plan import PagedPlan, Segment
from baton.engine.attention.triton_paged import TritonPaged
from baton.engine.kv_cache.paged_cache import PagedKVCache
from tests.device_tensors import DeviceTensors, access_of, values_of
from tests.plan_attention import PlanAttention
from tests.stream_checker import Access


class KernelAttention(TritonPaged):
    """The Triton backend with another implementation of its kernel."""

    def __init__(self, cache: PagedKVCache, tensors: DeviceTensors) -> None:
        super().__init__(cache, num_programs=1, capability=9)
        self._tensors = tensors

    def _attend(
        self,
        plan: PagedPlan,
        segment: Segment,
        first_token: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        variant: AttentionVariant,
    ) -> None:
        tables = ("sequences", "tables", "positions", "nodes", "ancestors", "pieces", "rows_of_tokens")
        given = [query, *(getattr(plan, name) for name in tables)]
        fixed = [*(access_of(tensor, writes=False) for tensor in given), access_of(output, writes=True)]
        on_host: list[Any] = [values_of(tensor) for tensor in (*given, output)]
        kept = [(values_of(rows), access_of(rows, writes=False)) for rows in (keys, values)]

        def run() -> Sequence[Access]:
            accesses = list(fixed)

            def read(layer: int, slots: torch.Tensor) -> list[torch.Tensor]:
                accesses.extend(Access(access.memory, slots.numpy(), writes=False) for _, access in kept)
                return [rows.index_select(0, slots) for rows, _ in kept]

            cache: Any = SimpleNamespace(spec=self._cache.spec, read=read)
            host_plan = PagedPlan(*on_host[1:-1], segments=plan.segments)
            with torch.inference_mode():
                PlanAttention(cache).attend(0, on_host[0], on_host[-1], host_plan, variant, segment)
            return accesses

        self._tensors.device.launch("attend", run)
