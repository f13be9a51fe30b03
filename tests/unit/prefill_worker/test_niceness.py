"""Prompts yield where they are brief, and as far as they are told to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pydantic import ValidationError

from cluster.config import PrefillConfig
from prefill_worker.niceness import pick_niceness


@dataclass(frozen=True)
class Runner:
    device: torch.device
    has_tiles: bool


ON_CPU, WITH_MATRIX_UNIT = Runner(torch.device("cpu"), False), Runner(torch.device("cpu"), True)
ON_GPU = Runner(torch.device("cuda"), False)


def test_auto_yields_where_a_matrix_unit_computes_prompts() -> None:
    niceness = PrefillConfig().niceness
    assert [pick_niceness(niceness, runner) for runner in (WITH_MATRIX_UNIT, ON_CPU, ON_GPU)] == [10, 0, 0]


def test_a_number_is_taken_at_its_word_on_cpus() -> None:
    assert [pick_niceness(3, runner) for runner in (WITH_MATRIX_UNIT, ON_CPU, ON_GPU)] == [3, 3, 0]


@pytest.mark.parametrize("value", [-1, 20, "low", None])
def test_what_nice_does_not_know_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        PrefillConfig.model_validate({"niceness": value})
