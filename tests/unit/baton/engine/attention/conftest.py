"""Fixtures with attention backends by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.kv_cache.paged_cache import PagedKVCache
from tests.interpreted_triton import interpreted_triton
from tests.plan_attention import PlanAttention

CreateBackend = Callable[[PagedKVCache], AttentionBackend]
MIN_KEYS = 4
NUM_PROGRAMS = 64


@pytest.fixture(scope="module")
def create_triton() -> Iterator[CreateBackend]:
    """Creates interpreted Triton backends in which several programs share even short contexts."""
    with interpreted_triton():
        from baton.engine.attention.triton_paged import TritonPaged

        yield lambda cache: TritonPaged(cache, MIN_KEYS, NUM_PROGRAMS)


@pytest.fixture(scope="module", params=["torch_sdpa", "plan", "triton_paged"])
def create_backend(request: pytest.FixtureRequest) -> CreateBackend:
    if request.param == "triton_paged":
        return request.getfixturevalue("create_triton")
    return {"torch_sdpa": TorchSDPA, "plan": PlanAttention}[request.param]
