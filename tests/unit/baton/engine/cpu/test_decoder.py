"""The fused decoder computes what transformers' modules do, and a token's result is the same in any company."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import baton.engine.cpu.forward
from baton.core.drafts import NO_DRAFT, ROOT, Draft, ScheduledSequence
from baton.core.errors import ConfigError, NotFusableError, UnsupportedModelError
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import FINAL_HIDDEN
from baton.engine.cpu.decoder import FusedDecoder
from baton.engine.cpu.tiles import has_tiles
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import FUSED_WEIGHTS, RunnerOptions
from baton.engine.runner.self_check import check_model
from benchmarks.device_run.attention_world import poison
from tests.fused_dtypes import FUSED_DTYPES
from tests.tiny_models import CONFIGS, VOCAB_SIZE, build_model, random_prompts, tiny_model

BLOCK_SIZE = 4
MOST = 150
TOLERANCE = 1e-4
TREE = Draft((5, 6, 7, 8, 9, 10), (ROOT, ROOT, 0, 0, 1, 4))

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaConfig", {}),
    "biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qkv_biases_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "head_norms": ("Qwen3Config", {"head_dim": 16}),
    "one_kv_head": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "no_sharing": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "three_share": ("LlamaConfig", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "heads_of_64": (
        "LlamaConfig",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "heads_of_96": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 96}),
    "odd_sizes": ("LlamaConfig", {"hidden_size": 40, "intermediate_size": 52, "head_dim": 20}),
    "head_of_128": ("LlamaConfig", {"head_dim": 128}),
    "head_of_80": ("LlamaConfig", {"head_dim": 80}),
    "wide": ("LlamaConfig", {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}),
    # A hundred such rows and more are several blocks for a matrix unit.
    "long_rows": ("LlamaConfig", {"hidden_size": 128, "intermediate_size": 4096, "head_dim": 32}),
    "wide_biases": (
        "LlamaConfig",
        {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    ),
}


def variant(name: str, dtype: str = "float32") -> LoadedModel:
    config_name, settings = VARIANTS[name]
    sizes = {**CONFIGS["llama"]().to_dict(), "max_position_embeddings": 512, **settings}
    for derived in ("architectures", "model_type", "transformers_version", "dtype"):
        sizes.pop(derived, None)
    if "head_dim" not in settings:
        sizes.pop("head_dim", None)
    model = build_model(getattr(transformers, config_name)(**sizes))
    return prepare_model(model.to(getattr(torch, dtype)), dtype)


class Runners:
    """One model over several caches, computed in different ways from the same plans.

    The last one computes in float32 whatever the model's dtype is.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *decoders: str,
        num_blocks: int = 128,
        block_size: int = BLOCK_SIZE,
        weights: str = "native",
        kv_cache: str = "native",
    ) -> None:
        self.each = [
            ModelRunner(
                loaded, num_blocks, block_size, RunnerOptions(decoder=decoder, weights=weights, kv_cache=kv_cache)
            )
            for decoder in decoders
        ]
        if "transformers" in decoders:
            exact = prepare_model(deepcopy(loaded.model).float(), "float32")
            self.each.append(
                ModelRunner(exact, num_blocks, block_size, RunnerOptions(decoder="transformers", kv_cache=kv_cache))
            )
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=False)
        for runner in self.each:
            poison(runner.cache)

    def request(self, name: str, length: int) -> Request:
        request = Request(name, random_prompts([length], seed=len(name))[0], SamplingParams())
        self.blocks.grow(request, length + 16)
        return request

    def step(self, *parts: tuple[Request, int] | tuple[Request, int, Draft]) -> list[torch.Tensor]:
        plan = [ScheduledSequence(*part) for part in parts]
        logits = [runner.forward(runner.build_batch(plan)) for runner in self.each]
        for request, num_tokens, *_ in parts:
            request.num_computed_tokens += num_tokens
        return logits


def both(name: str, dtype: str = "float32", num_blocks: int = 128, block_size: int = BLOCK_SIZE) -> Runners:
    return Runners(variant(name, dtype), "fused", "transformers", num_blocks=num_blocks, block_size=block_size)


def assert_as_good(fused: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """The fused decoder is about as far from exact logits as transformers, which rounds more often."""
    assert fused.shape == plain.shape
    allowed = max(1.5 * float((plain - exact).norm()), TOLERANCE * float(exact.norm()))
    assert float((fused - exact).norm()) <= allowed


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_logits_match_transformers(name: str, dtype: str) -> None:
    runners = both(name, dtype)
    a, b, c = (runners.request("x" * index, length) for index, length in enumerate((23, 90, 9), start=1))
    runners.step((a, 22), (b, 70))
    for plan in ([(a, 1), (b, 13), (c, 5)], [(b, 7), (c, 4)]):
        assert_as_good(*runners.step(*plan))


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("length", [7, 61, 64, 70, 257, 300])
@pytest.mark.parametrize("name", ["three_share", "heads_of_64", "wide_biases"])
def test_tree_nodes_see_only_their_ancestors(name: str, length: int, dtype: str) -> None:
    runners = both(name, dtype)
    a, b = runners.request("a", length), runners.request("bb", 21)
    runners.step((a, length - 1), (b, 20))
    logits = runners.step((a, 1, TREE), (b, 1, Draft((4, 5))))
    assert len(logits[0]) == 1 + len(TREE) + 3
    assert_as_good(*logits)


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("length", [7, 60, 61, 62, 63, 64, 70, 254, 257, 300])
@pytest.mark.parametrize("name", ["three_share", "heads_of_64", "wide_biases"])
def test_tree_tokens_are_bit_identical_to_chain_tokens(name: str, length: int, dtype: str) -> None:
    assert_trees_are_chains(variant(name, dtype), length)


def assert_trees_are_chains(loaded: LoadedModel, length: int, kv_cache: str = "native") -> None:
    runners = Runners(loaded, "fused", kv_cache=kv_cache)
    request = runners.request("a", length)
    runners.step((request, length - 1))
    [verified] = runners.step((request, 1, TREE))
    for node in range(len(TREE)):
        alone = Runners(loaded, "fused", kv_cache=kv_cache)
        same = alone.request("a", length)
        alone.step((same, length - 1))
        path = tuple(TREE.token_ids[above] for above in TREE.path(node))
        [chain] = alone.step((same, 1, Draft(path)))
        assert torch.equal(verified[1 + node], chain[-1])


@pytest.mark.parametrize("weights", FUSED_WEIGHTS)
@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize(
    ("name", "length"),
    [("three_share", 75), ("three_share", 300), ("heads_of_64", 300), ("wide_biases", 300), ("long_rows", 300)],
)
def test_a_token_is_bit_identical_alone_and_in_any_batch(name: str, length: int, dtype: str, weights: str) -> None:
    assert_same_in_company(variant(name, dtype), length, weights=weights)


def assert_same_in_company(loaded: LoadedModel, length: int, **ways: str) -> None:
    alone = Runners(loaded, "fused", **ways)
    together = Runners(loaded, "fused", num_blocks=256, **ways)
    lone = alone.request("a", length)
    expected = [alone.step((lone, 1))[0][-1:] for _ in range(length)][-1]

    same = together.request("a", length)
    others = [together.request("b" * size, 20 + size) for size in range(1, 9)]
    together.step((same, 40), *((other, 3) for other in others))
    together.step((same, length - 41), *((other, size) for size, other in enumerate(others, start=1)))
    plan = [ScheduledSequence(same, 1, Draft((3, 4))), *(ScheduledSequence(other, 1) for other in others)]
    batch = together.each[0].build_batch(plan)
    row = batch.rows_of[[s.request for s in batch.sequences].index(same)][0]
    assert torch.equal(together.each[0].forward(batch)[row : row + 1], expected)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_cpus_without_a_matrix_unit_differ_only_by_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [("a", 90), ("bb", 5), ("ccc", 40)]
    results = []
    for with_tiles in (True, False):
        if not with_tiles:
            monkeypatch.setattr(baton.engine.cpu.forward, "has_tiles", lambda: False)
        runners = both(name, "bfloat16")
        requests = [runners.request(*each) for each in plan]
        runners.step(*((request, 1) for request in requests))
        results.append(runners.step(*((r, length - 1) for r, (_, length) in zip(requests, plan, strict=True))))
        assert_as_good(*results[-1])
    if has_tiles() and name.startswith("wide"):
        assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    loaded = variant("wide")
    results = []
    before = torch.get_num_threads()
    for threads in (1, num_threads):
        torch.set_num_threads(threads)
        try:
            runners = Runners(loaded, "fused")
            request = runners.request("a", 400)
            results.append([runners.step((request, count))[0] for count in (390, 9, 1)][-1])
            runners.each[0].close()
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


def test_more_threads_than_the_maximum_are_harmless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("forward", "decoder"):
        monkeypatch.setattr(f"baton.engine.cpu.{module}.MAX_THREADS", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with caplog.at_level("INFO", "baton.engine.cpu.decoder"):
            runners = both("wide")
        assert "computes with 2 of 3 threads" in caplog.text
        assert_as_good(*runners.step((runners.request("a", 40), 40)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_every_block_size_matches_transformers(block_size: int) -> None:
    runners = both("plain", num_blocks=400 // block_size + 2, block_size=block_size)
    request = runners.request("a", 150)
    runners.step((request, 100))
    assert_as_good(*runners.step((request, 50)))


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[int, int, Draft]]]:
    """Steps of (request, known tokens, draft); every request is computed up to a random place."""
    steps = []
    computed = [0] * 4
    for _ in range(draw(st.integers(1, 4))):
        step = []
        for index in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)):
            count = draw(st.integers(1, 90))
            if computed[index] + count < MOST:
                step.append((index, count, NO_DRAFT))
                computed[index] += count
        steps.append(step)
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))
    steps.append([(index, MOST - at, Draft(tuple(range(3, 3 + size)), parents)) for index, at in enumerate(computed)])
    return [step for step in steps if step]


@pytest.fixture(
    scope="module",
    params=[("head_norms", "float32"), ("heads_of_64", "bfloat16")],
    ids=lambda p: p[0],
)
def shared(request: pytest.FixtureRequest) -> Runners:
    return both(*request.param, num_blocks=512)


@settings(max_examples=40, deadline=None)
@given(steps=plans())
def test_every_plan_matches_the_logits_of_transformers(
    shared: Runners, steps: list[list[tuple[int, int, Draft]]]
) -> None:
    shared.blocks = BlockManager(512, BLOCK_SIZE, prefix_caching=False)
    requests = [shared.request("x" * (index + 1), MOST) for index in range(4)]
    for step in steps:
        logits = shared.step(*((requests[index], count, draft) for index, count, draft in step))
        if len(logits[0]):
            assert_as_good(*logits)


def test_steps_that_complete_no_prompt_give_no_logits() -> None:
    runners = Runners(variant("plain"), "fused")
    assert runners.step((runners.request("a", 30), 12))[0].shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_nan_propagates(dtype: str) -> None:
    loaded = variant("plain", dtype)
    runners = Runners(loaded, "fused")
    request = runners.request("a", 9)
    runners.step((request, 8))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[request.prompt_token_ids[8]] = torch.nan
    assert bool(runners.step((request, 1))[0].isnan().all())


@pytest.mark.parametrize("layers", [(0, 1, FINAL_HIDDEN), (FINAL_HIDDEN, 2), (1, 0, 1)])
def test_features_match_the_hidden_states_of_transformers(layers: tuple[int, ...]) -> None:
    loaded = variant("plain")
    tokens = random_prompts([11])[0]
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = loaded.model(torch.tensor([tokens]), output_hidden_states=True)
    cache = PagedKVCache(loaded.kv_spec(BLOCK_SIZE), 8, torch.device("cpu"))
    decoder = FusedDecoder(loaded, cache, layers)
    request = Request("a", tokens, SamplingParams())
    BlockManager(8, BLOCK_SIZE, prefix_caching=False).grow(request, len(tokens))
    span = ScheduledSequence(request, len(tokens))
    decoder.forward(ForwardBatch.build([span], BLOCK_SIZE, torch.device("cpu"), torch.float32))
    expected = [output.hidden_states[layer][0] for layer in layers]
    assert decoder.features is not None
    taken = decoder.features.take().split(expected[0].shape[-1], dim=-1)
    for layer, state, own in zip(layers, expected, taken, strict=True):
        if layer != 2:  # transformers norms the last one
            torch.testing.assert_close(own, state, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(loaded.model.get_decoder().norm(own), output.hidden_states[-1][0])
    with pytest.raises(RuntimeError, match="no forward"):
        decoder.features.take()


def test_an_unknown_feature_is_refused() -> None:
    loaded = variant("plain")
    cache = PagedKVCache(loaded.kv_spec(BLOCK_SIZE), 8, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="has 2 layers"):
        FusedDecoder(loaded, cache, [7])


def scaled_residuals() -> PreTrainedModel:
    return tiny_model("granite")


def scaled_by_position() -> PreTrainedModel:
    config = CONFIGS["ministral3"]()
    config.rope_parameters["original_max_position_embeddings"] = 64
    return build_model(config)


@pytest.mark.parametrize("build", [scaled_residuals, scaled_by_position])
def test_a_model_that_only_looks_similar_uses_transformers(build: Any) -> None:
    loaded = prepare_model(build(), "float32")
    assert not ModelRunner(loaded, 16, BLOCK_SIZE).is_fused
    with pytest.raises(NotFusableError, match="different logits"):
        ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(decoder="fused"))


def test_an_unsupported_part_is_named() -> None:
    loaded = prepare_model(tiny_model("mixtral"), "float32")
    with pytest.raises(UnsupportedModelError, match="an unknown part experts"):
        ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(decoder="fused"))


def test_the_model_is_not_modified() -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runner = ModelRunner(prepare_model(model, "float32"), 16, BLOCK_SIZE, RunnerOptions(decoder="fused"))
    check_model(runner)
    runner.close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.decoder is 'fast'"):
        ModelRunner(prepare_model(tiny_model("llama"), "float32"), 16, BLOCK_SIZE, RunnerOptions(decoder="fast"))
