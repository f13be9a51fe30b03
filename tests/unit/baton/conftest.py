"""Fixtures of the engine's unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.engine.models import float32_products


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Limits torch to one thread, because tiny products are slower with a thread pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The weight dtypes of the products of :mod:`baton.engine.models.float32_products`, in order."""
    found: list[torch.dtype] = []

    def noted(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found.append(weight.dtype)
        return torch.nn.functional.linear(states, weight, bias)

    monkeypatch.setattr(float32_products, "linear", noted)
    return found
