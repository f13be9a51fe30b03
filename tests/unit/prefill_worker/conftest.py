"""The two ends of a hand-off."""

import pytest

from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import build_runner
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner(tiny_model("llama"), 24)
