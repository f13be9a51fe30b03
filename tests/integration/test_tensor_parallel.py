"""A model over several ranks computes what it computes in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

WITHOUT_PLAN = ("biogpt", "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe", "opt", "stablelm")
DIVIDED = sorted(set(CONFIGS) - set(WITHOUT_PLAN))
IN_SHORT = sorted({"llama", "qwen3", "mixtral", *(KIND_OF[name] for name in DIVIDED)} - set(WITHOUT_PLAN))
"""The architectures whose tokens ``make test`` compares; it compares the logits of all."""


SET_SIZE = 12
"""Architectures that the same ranks compute one after another: starting ranks takes long, and so do many models."""
SIZES = (2, 4)


@dataclass(frozen=True, slots=True)
class Both:
    """What architectures compute in one process, and over several ranks."""

    whole: dict[str, Facts]
    divided: dict[str, Facts]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    size, first = request.param
    thorough, root = request.config.getoption("--thorough"), tmp_path_factory.mktemp("models")
    names = DIVIDED[first : first + SET_SIZE]
    tasks = {name: (save(divisible_model(name), root / name), thorough or name in IN_SHORT) for name in names}
    whole = {name: facts_of(folder, None, with_tokens=tokens) for name, (folder, tokens) in tasks.items()}
    with joined(facts_of_all, list(tasks.values()), size) as (group, _):
        divided = {name: facts_of(folder, group, with_tokens=tokens) for name, (folder, tokens) in tasks.items()}
        load(tasks[names[0]][0], group)
        yield Both(whole, divided)


def for_each(names: Sequence[str], in_short: Sequence[str]) -> pytest.MarkDecorator:
    """Cases of a test with ``both`` and ``name``, in the order of what is computed together."""
    cases = []
    for size in SIZES:
        for index, name in enumerate(DIVIDED):
            if name not in names:
                continue
            is_short = size == SIZES[0] and name in in_short
            marks = () if is_short else pytest.mark.thorough(covered_by=f"[{SIZES[0]}-llama]")
            cases.append(pytest.param((size, index - index % SET_SIZE), name, marks=marks, id=f"{size}-{name}"))
    return pytest.mark.parametrize(("both", "name"), cases, indirect=["both"])


@for_each(DIVIDED, in_short=DIVIDED)
def test_logits_are_those_of_one_process(both: Both, name: str) -> None:
    assert relative_distance(both.divided[name].logits, both.whole[name].logits) < 1e-5


@for_each(DIVIDED, in_short=DIVIDED)
def test_the_layout_and_its_fingerprint_are_those_of_one_process(both: Both, name: str) -> None:
    assert both.divided[name].spec == both.whole[name].spec
    assert both.divided[name].spec.fingerprint() == both.whole[name].spec.fingerprint()


@for_each(DIVIDED, in_short=IN_SHORT)
def test_tokens_are_those_of_one_process(both: Both, name: str) -> None:
    assert both.whole[name].tokens
    assert both.divided[name].tokens == both.whole[name].tokens


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_models_without_a_plan_are_refused_by_name(name: str) -> None:
    model = empty_model(CONFIGS[name](), torch.float32)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}.*no plan.*degree of 1"):
        make_plan(model, 2)
