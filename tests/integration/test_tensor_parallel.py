"""A model over several ranks computes what it computes in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from baton.core.errors import UnsupportedModelError
from baton.engine.models.empty_model import empty_model
from baton.engine.models.model_loader import own_logits, relative_distance
from baton.engine.parallel.plan import make_plan
from tests.architectures import KIND_OF
from tests.ranked_models import (
    PROMPTS,
    Facts,
    build_fp8_follower,
    divisible_model,
    facts_of,
    facts_of_all,
    fp8_logits,
    joined,
    load,
    save,
)
from tests.tiny_models import CONFIGS

WITHOUT_PLAN = ("biogpt", "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe", "opt", "stablelm")
DIVIDED = sorted(set(CONFIGS) - set(WITHOUT_PLAN))
IN_SHORT = sorted({"llama", "qwen3", "mixtral", *(KIND_OF[name] for name in DIVIDED)} - set(WITHOUT_PLAN))
"""The architectures whose tokens ``make test`` compares; it compares the logits of all."""


SET_SIZE = 12
"""Architectures that the same ranks compute one after another: starting ranks takes long, and so do many models."""


@dataclass(frozen=True, slots=True)
class Both:
    """What architectures compute in one process, and over several ranks."""

    whole: dict[str, Facts]
    divided: dict[str, Facts]


class Sets:
    """Computes sets of architectures when a test asks for one of them, and keeps what they computed.

    Args:
        root: where models are saved.
        thorough: compute the tokens of all architectures.
    """

    def __init__(self, root: Path, *, thorough: bool) -> None:
        self._root, self._thorough = root, thorough
        self._known: dict[tuple[int, int], Both] = {}

    def of(self, size: int, name: str) -> tuple[Facts, Facts]:
        """What an architecture computes in one process, and over ``size`` ranks."""
        index = DIVIDED.index(name)
        place = size, index - index % SET_SIZE
        if place not in self._known:
            self._known[place] = self._compute(*place)
        return self._known[place].whole[name], self._known[place].divided[name]

    def _compute(self, size: int, first: int) -> Both:
        tasks = {}
        for name in DIVIDED[first : first + SET_SIZE]:
            folder = save(divisible_model(name), self._root / f"{size}-{name}")
            tasks[name] = folder, self._thorough or name in IN_SHORT
        whole = {name: facts_of(folder, None, with_tokens=tokens) for name, (folder, tokens) in tasks.items()}
        with joined(facts_of_all, list(tasks.values()), size) as (group, _):
            divided = {name: facts_of(folder, group, with_tokens=tokens) for name, (folder, tokens) in tasks.items()}
            load(next(iter(tasks.values()))[0], group)
            return Both(whole, divided)


@pytest.fixture(scope="module")
def sets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(tmp_path_factory.mktemp("models"), thorough=request.config.getoption("--thorough"))


def for_each(in_short: Sequence[str]) -> pytest.MarkDecorator:
    """Cases for all architectures over two ranks, and thorough ones over four."""
    cases = []
    for size in (2, 4):
        for name in DIVIDED:
            marks = () if size == 2 and name in in_short else pytest.mark.thorough(covered_by="[2-llama]")
            cases.append(pytest.param(size, name, marks=marks, id=f"{size}-{name}"))
    return pytest.mark.parametrize(("size", "name"), cases)


@for_each(in_short=DIVIDED)
def test_logits_are_those_of_one_process(sets: Sets, size: int, name: str) -> None:
    whole, divided = sets.of(size, name)
    assert relative_distance(divided.logits, whole.logits) < 1e-5


@for_each(in_short=DIVIDED)
def test_the_layout_and_its_fingerprint_are_those_of_one_process(sets: Sets, size: int, name: str) -> None:
    whole, divided = sets.of(size, name)
    assert divided.spec == whole.spec
    assert divided.spec.fingerprint() == whole.spec.fingerprint()


@for_each(in_short=IN_SHORT)
def test_tokens_are_those_of_one_process(sets: Sets, size: int, name: str) -> None:
    whole, divided = sets.of(size, name)
    assert whole.tokens
    assert divided.tokens == whole.tokens


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_models_without_a_plan_are_refused_by_name(name: str) -> None:
    model = empty_model(CONFIGS[name](), torch.float32)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}.*no plan.*degree of 1"):
        make_plan(model, 2)


def test_two_ranks_compute_in_fp8(tmp_path: Path) -> None:
    """Each rank scales its own part of a row, so logits differ from those of one process, but no more from exact ones.

    Compared are the distances from logits of float32.
    """
    folder = save(divisible_model("llama"), tmp_path)
    exact = own_logits(load(folder, None).model, PROMPTS[-1])
    _, whole = fp8_logits(folder, None)
    with joined(build_fp8_follower, folder, 2) as (group, _):
        _, divided = fp8_logits(folder, group)
    assert relative_distance(divided, exact) < 1.5 * relative_distance(whole, exact)
