"""A model over several ranks computes what it computes in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from baton.core.errors import UnsupportedModelError
from baton.engine.models.empty_model import empty_model
from baton.engine.models.model_loader import relative_distance
from baton.engine.parallel.plan import make_plan
from tests.architectures import KIND_OF
from tests.ranked_models import Facts, divisible_model, facts_of, facts_of_all, joined, load, save
from tests.tiny_models import CONFIGS

pytestmark = pytest.mark.timeout(1800)  # the fixture computes all architectures, on up to four ranks
WITHOUT_PLAN = ("biogpt", "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe", "opt", "stablelm")
DIVIDED = sorted(set(CONFIGS) - set(WITHOUT_PLAN))
IN_SHORT = sorted({"llama", "qwen3", "mixtral", *(KIND_OF[name] for name in DIVIDED)} - set(WITHOUT_PLAN))
"""The architectures whose tokens ``make test`` compares; it compares the logits of all."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(divisible_model(name), root / name) for name in DIVIDED}


@dataclass(frozen=True, slots=True)
class Both:
    """What each architecture computes in one process, and over several ranks."""

    whole: dict[str, Facts]
    divided: dict[str, Facts]


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough(covered_by="[2-"))], ids=["2", "4"]
)
def both(request: pytest.FixtureRequest, folders: dict[str, str]) -> Iterator[Both]:
    with_tokens = {name: request.config.getoption("--thorough") or name in IN_SHORT for name in DIVIDED}
    whole = {name: facts_of(folder, None, with_tokens=with_tokens[name]) for name, folder in folders.items()}
    tasks = [(folder, with_tokens[name]) for name, folder in folders.items()]
    with joined(facts_of_all, tasks, request.param) as (group, _):
        divided = {name: facts_of(folder, group, with_tokens=with_tokens[name]) for name, folder in folders.items()}
        load(tasks[0][0], group)
        yield Both(whole, divided)


@pytest.mark.parametrize("name", DIVIDED)
def test_logits_are_those_of_one_process(both: Both, name: str) -> None:
    assert relative_distance(both.divided[name].logits, both.whole[name].logits) < 1e-5


@pytest.mark.parametrize("name", DIVIDED)
def test_the_layout_and_its_fingerprint_are_those_of_one_process(both: Both, name: str) -> None:
    assert both.divided[name].spec == both.whole[name].spec
    assert both.divided[name].spec.fingerprint() == both.whole[name].spec.fingerprint()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.thorough(covered_by="[2-llama]"))
        for name in DIVIDED
    ],
)
def test_tokens_are_those_of_one_process(both: Both, name: str) -> None:
    assert both.whole[name].tokens
    assert both.divided[name].tokens == both.whole[name].tokens


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_models_without_a_plan_are_refused_by_name(name: str) -> None:
    model = empty_model(CONFIGS[name](), torch.float32)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}.*no plan.*degree of 1"):
        make_plan(model, 2)
