"""The benchmark of engine steps: its plans and its estimate of the limit."""

from __future__ import annotations

import pytest
import torch

from baton.core.drafts import ROOT
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.options import KV_CACHES
from benchmarks.ceilings import Ceilings
from benchmarks.engine_steps import Case, Work, make_plan, make_runners, step_of
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare_model(tiny_model("llama"), "float32")


def test_the_limit_is_the_slower_of_memory_and_arithmetic(loaded: LoadedModel) -> None:
    work = Work(loaded, kv_bytes_per_token=512)
    layers = sum(parameter.numel() for parameter in loaded.model.get_decoder().layers.parameters())
    head = loaded.model.get_output_embeddings().weight.numel()
    reads = 4 * (layers + head) + 3 * 100 * 512
    slow_memory = Ceilings(bytes_per_second=1e6, flops_per_second=1e15, multiplied="float32")
    assert work.least_ms(Case(3, 1, 100), slow_memory) == pytest.approx(reads / 1e3)

    for weights, size in (("int8", 1.0), ("int4", 0.625)):
        reads = size * layers + head + 3 * 100 * 512
        assert Work(loaded, 512, weights).least_ms(Case(3, 1, 100), slow_memory) == pytest.approx(reads / 1e3)

    slow_products = Ceilings(bytes_per_second=1e15, flops_per_second=1e6, multiplied="float32")
    alone, many = (work.least_ms(Case(batch, 1, 100), slow_products) for batch in (1, 3))
    assert many == pytest.approx(3 * alone)


def test_prefill_computes_one_row_of_logits(loaded: LoadedModel) -> None:
    slow_products = Ceilings(bytes_per_second=1e15, flops_per_second=1e6, multiplied="float32")
    prefill = Work(loaded, 512).least_ms(Case(1, 8, 0), slow_products)
    assert prefill < Work(loaded, 512).least_ms(Case(1, 8, 1), slow_products)


def test_every_tree_node_has_two_children() -> None:
    (sequence,) = make_plan(Case(1, 7, 20, tree=True), 16)
    assert sequence.draft.parents == (ROOT, ROOT, 0, 0, 1, 1)
    assert sequence.request.num_computed_tokens == 20


def test_equivalent_configurations_are_measured_once() -> None:
    other = prepare_model(tiny_model("gpt2"), "float32")
    assert list(make_runners(other, 4, ["auto", "transformers"])) == ["transformers"]
    assert list(make_runners(prepare_model(tiny_model("llama"), "float32"), 4, ["auto", "transformers"])) == [
        "fused",
        "transformers",
    ]


def test_every_decoder_runs_every_cache_over_the_same_model() -> None:
    """Passes of one model take turns, each over its own cache."""
    runners = make_runners(prepare_model(tiny_model("llama"), "float32"), 4, ["transformers"], ("native",), KV_CACHES)
    assert list(runners) == ["transformers", "transformers+kv_int8"]
    plan = make_plan(Case(1, 8, 0), 4)
    first, other, again = (
        runners[name].forward(runners[name].build_batch(plan))
        for name in ("transformers", "transformers+kv_int8", "transformers")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_step_is_run_and_timed(loaded: LoadedModel) -> None:
    runner = make_runners(loaded, 8, ["auto"])["fused"]
    assert step_of(Case(2, 1, 20), runner)() > 0
