"""Whole tiny models: the same tokens by graphs, overlap and every speculation method, and after failed recordings."""

from __future__ import annotations

import pytest

from benchmarks.device_run import models_part
from benchmarks.device_run.part import Row
from tests.device.conftest import SETTING

CHECKS = models_part.__name__


@pytest.mark.parametrize("name", models_part.names(SETTING))
def test_tokens_match_transformers_or_plain_steps(name: str, rows_of: dict[str, list[Row]]) -> None:
    assert rows_of[name]
    assert [row for row in rows_of[name] if not row["ok"]] == []
