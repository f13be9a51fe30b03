"""The host and the device read the same results from a draft's logits."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine.device import downloads
from decode_worker.speculation import chains

TARGET_IDS = torch.tensor([40, 7, 12, 3, 99, 0, 8])
NAN, INF = math.nan, math.inf
ROWS = {
    "numbers": [1.0, -2.0, 3.5, 3.0, 0.0, 0.5, -1.0],
    "a tie": [1.0, 4.0, 4.0, 0.0, 4.0, 0.0, 0.0],
    "impossible tokens": [-INF, 2.0, -INF, 1.0, -INF, -INF, -INF],
    "one possible token": [-INF, -INF, -INF, -90.0, -INF, -INF, -INF],
    "large": [3e38, 1.0, 3e38, 0.0, -3e38, 0.0, 0.0],
    "NaN": [1.0, NAN, 3.0, 0.0, 0.0, 0.0, 0.0],
    "infinite": [1.0, 0.0, INF, 0.0, 0.0, 0.0, 0.0],
    "nothing possible": [-INF] * 7,
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors count as a device's."""
    for module in (chains, downloads):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)


def likeliest(dtype: torch.dtype = torch.float32) -> tuple[list[int], list[float]]:
    logits = torch.tensor(list(ROWS.values())).to(dtype)
    return chains.likeliest(logits, lambda columns: TARGET_IDS[columns])


def test_the_host_finds_the_first_maximum_and_its_probability() -> None:
    found = dict(zip(ROWS, zip(*likeliest(), strict=True), strict=True))
    assert found["numbers"] == (12, pytest.approx(float(torch.tensor(ROWS["numbers"]).softmax(dim=-1)[2])))
    assert found["a tie"][0] == 7
    assert found["one possible token"] == (3, 1.0)
    assert all(math.isnan(found[name][1]) for name in ("NaN", "infinite", "nothing possible"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_finds_the_same_maximum(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    token_ids, probabilities = likeliest(dtype)
    request.getfixturevalue("elsewhere")
    found_ids, found = likeliest(dtype)
    assert found_ids == token_ids
    assert found == pytest.approx(probabilities, rel=1e-5, nan_ok=True)


def test_fetched_values_match_the_tensors(elsewhere: None) -> None:
    tensors = (torch.tensor([[2**53, -1]]), torch.tensor([0.1, NAN]), torch.tensor([True, False]), torch.tensor(3))
    ids, numbers, flags, scalar = downloads.fetch(*tensors)
    assert (ids, flags, scalar) == ([[2**53, -1]], [True, False], 3)
    assert all(type(token) is int for token in ids[0])
    assert numbers == pytest.approx(tensors[1].tolist(), abs=0, nan_ok=True)
