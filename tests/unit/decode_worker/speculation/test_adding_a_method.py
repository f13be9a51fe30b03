"""The code in docs/adding-a-speculation-method.md works unchanged."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from baton.core.request import Request, SamplingParams
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation import registry
from tests.drafting import engine_over, run
from tests.engine_runs import build_runner
from tests.tiny_models import random_prompts, tiny_model

PAGE = Path(__file__).parents[4] / "docs" / "adding-a-speculation-method.md"
EXAMPLE, ENTRY = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("bigram")
    monkeypatch.setitem(sys.modules, "bigram", module)  # dataclasses look their module up
    exec(compile(EXAMPLE, str(PAGE), "exec"), vars(module))
    entry = eval("{" + ENTRY + "}", {**vars(registry), **vars(module)})
    monkeypatch.setitem(registry.METHODS, *next(iter(entry.items())))


def requests() -> list[Request]:
    params = SamplingParams(max_tokens=40, temperature=0)
    return [Request(str(index), prompt, params) for index, prompt in enumerate(random_prompts([4, 9, 20]))]


def test_the_example_has_at_most_sixty_lines() -> None:
    assert len(EXAMPLE.splitlines()) <= 60


@pytest.mark.usefixtures("_registered")
def test_the_example_changes_no_token_and_its_drafts_are_accepted() -> None:
    runner = build_runner(tiny_model("llama"), decoder="transformers")
    plain = run(engine_over(runner), requests())
    controller = registry.create_controller(SpeculationConfig(), runner, None, default="bigram")
    assert run(engine_over(runner, controller), requests()) == plain
    assert controller.num_failures == 0
    assert controller.figures.by_method["bigram"].num_accepted > 0
