"""The reported rates of the machine are those of the measured products."""

from __future__ import annotations

import pytest
import torch

from benchmarks import ceilings
from benchmarks.ceilings import in_turn, measure_ceilings, median_ratio

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "multiplied"),
    [
        (torch.bfloat16, True, "bfloat16"),
        (torch.bfloat16, False, "float32"),
        (torch.float32, False, "float32"),
        (torch.float16, False, "float16"),
    ],
)
def test_the_rate_names_its_dtype(
    dtype: torch.dtype, has_bfloat16: bool, multiplied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "has_bfloat16", lambda device: has_bfloat16)
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "_PRODUCT_SIZES", {"cpu": (16, 32)})
    measured = measure_ceilings(dtype, CPU)
    assert measured.multiplied == multiplied
    assert measured.bytes_per_second > 0
    assert measured.flops_per_second > 0


def test_measurements_alternate_after_a_warm_up() -> None:
    calls: list[str] = []

    def work(name: str) -> float:
        calls.append(name)
        return len(calls)

    results = in_turn({"a": lambda: work("a"), "b": lambda: work("b")}, 3)
    assert calls == ["a", "b"] * 5
    assert results == {"a": [5, 7, 9], "b": [6, 8, 10]}
    assert median_ratio(results["b"], results["a"]) == 8 / 7
