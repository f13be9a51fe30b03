"""int8 and int4 weights: a bounded loss, exact formulas, and errors for unsupported models and decoders."""

from __future__ import annotations

import pytest
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import ConfigError, NotFusableError, UnsupportedModelError
from baton.core.request import Request, SamplingParams
from baton.engine.cpu.nibbles import GROUP
from baton.engine.cpu.quantization import quantize_linear, quantize_linear_int4
from baton.engine.cpu.structure import Linear
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import build_engine, run_tokens
from tests.rounded_weights import numbers_of, rounded, with_rounded_weights
from tests.tiny_models import random_prompts, reference_tokens, tiny_model

BLOCK_SIZE = 4
QUANTIZED = ("int8", "int4")


def logits_of(runner: ModelRunner, chunks: tuple[int, ...]) -> torch.Tensor:
    length = sum(chunks)
    request = Request("a", random_prompts([length])[0], SamplingParams())
    request.block_ids = list(range(-(-length // BLOCK_SIZE)))
    for chunk in chunks:
        logits = runner.forward(runner.build_batch([ScheduledSequence(request, chunk)]))
        request.num_computed_tokens += chunk
    return logits[-1]


def tiny(name: str = "llama", dtype: str = "float32") -> LoadedModel:
    return prepare_model(tiny_model(name).to(getattr(torch, dtype)), dtype)


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_match_the_rounded_weights(name: str, weights: str) -> None:
    loaded = tiny(name)
    own = ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights=weights))
    expected = ModelRunner(with_rounded_weights(loaded, weights), 16, BLOCK_SIZE, RunnerOptions(decoder="transformers"))
    for chunks in ((30,), (20, 3, 1)):
        torch.testing.assert_close(logits_of(own, chunks), logits_of(expected, chunks), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.04), ("bfloat16", 0.08)])
def test_the_rounding_loss_is_bounded_and_not_zero(dtype: str, most: float) -> None:
    loaded = tiny(dtype=dtype)
    exact = logits_of(ModelRunner(prepare_model(tiny_model("llama"), "float32"), 16, BLOCK_SIZE), (30, 1))
    runner = ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights="int8"))
    check_model(runner)
    loss = float((logits_of(runner, (30, 1)) - exact).norm() / exact.norm())
    assert 1e-4 < loss < most


@pytest.mark.parametrize("weights", QUANTIZED)
def test_engine_tokens_match_the_rounded_weights(weights: str) -> None:
    loaded = tiny()
    prompts = random_prompts([5, 30, 17, 9])
    exact = with_rounded_weights(loaded, weights).model
    exact.set_attn_implementation("eager")
    expected = reference_tokens(exact, prompts, 12)
    engine = build_engine(ModelRunner(loaded, 128, BLOCK_SIZE, RunnerOptions(weights=weights)), chunk_tokens=16)
    assert run_tokens(engine, prompts, 12) == expected


def test_an_int8_row_is_off_by_at_most_half_a_unit() -> None:
    weight = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    made = quantize_linear(Linear(weight, None))
    assert made.weight.dtype is torch.int8
    error = (numbers_of(made, 20, 50) - weight).abs()
    assert bool((error <= weight.abs().amax(dim=1, keepdim=True) / 254 * 1.0001).all())
    assert bool((made.weight[3] == 0).all())
    assert int(made.weight.abs().amax()) == 127


@pytest.mark.parametrize("width", [64, 50, 7])
def test_an_int4_group_is_off_by_at_most_half_a_step(width: int) -> None:
    weight = torch.randn(20, width, generator=torch.Generator().manual_seed(1)) + 0.5
    weight[3], weight[4] = 0.0, 0.25
    made = quantize_linear_int4(Linear(weight, None))
    worth = numbers_of(made, 20, width)
    for group in range(0, width, GROUP):
        part, error = weight[:, group : group + GROUP], (worth - weight)[:, group : group + GROUP].abs()
        extent = part.amax(dim=1, keepdim=True) - part.amin(dim=1, keepdim=True)
        # Steps and minimums are rounded to eleven bits.
        assert bool((error <= extent / 30 + (extent + part.abs().amax(dim=1, keepdim=True)) / 2**11).all())
    assert bool((worth[3] == 0.0).all())
    assert bool((worth[4] == 0.25).all())
    assert made.scales is not None
    assert made.weight.numel() * 2 + made.scales.numel() * 2 == 32 * -(-width // GROUP) * 20


def test_int4_weights_round_trip_to_the_same_bfloat16() -> None:
    weight = (torch.randn(200, 320, generator=torch.Generator().manual_seed(1)) * 0.1).bfloat16()
    once = rounded(weight, "int4").bfloat16()
    assert not torch.equal(once, weight)
    assert torch.equal(rounded(once, "int4").bfloat16(), once)


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_nan_is_not_hidden(broken: float, weights: str) -> None:
    weight = torch.ones(3, 8)
    weight[1, 2] = broken
    assert (~rounded(weight, weights).isfinite()).any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("large", [1e30, 7e4])
def test_weights_beyond_the_int4_scales_are_refused(large: float) -> None:
    """float16 ends at 65504."""
    weight = torch.full((3, 8), large)
    assert bool(rounded(weight, "int8").isfinite().all())
    with pytest.raises(NotFusableError, match="too large for int4"):
        rounded(weight, "int4")


def test_a_group_narrower_than_a_step_becomes_its_middle() -> None:
    weight = 0.5 + torch.linspace(0, 2e-7, 32)[None]
    assert torch.allclose(rounded(weight, "int4"), weight, rtol=0, atol=3e-4)
    tiny = torch.linspace(-1e-7, 1e-7, 32)[None]
    assert bool((rounded(tiny, "int4").abs() < 1e-7).all())


@pytest.mark.parametrize("others", [("native", "int8"), ("native", "int4"), ("int8", "int4")])
def test_caches_of_different_weights_are_not_exchanged(others: tuple[str, str]) -> None:
    loaded = tiny()
    here, there = (ModelRunner(loaded, 4, BLOCK_SIZE, RunnerOptions(weights=weights)).spec for weights in others)
    assert here.fingerprint() != there.fingerprint()
    assert here.differences(there) == [f"weights: {others[0]} here, {others[1]} there"]


@pytest.mark.parametrize("weights", QUANTIZED)
def test_the_model_keeps_its_original_weights(weights: str) -> None:
    loaded = tiny()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights=weights)).close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())


@pytest.mark.parametrize("weights", QUANTIZED)
def test_an_unsupported_model_is_refused(weights: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"only the fused decoder supports.*an unknown part experts.*weights: native"
    ):
        ModelRunner(tiny("mixtral"), 16, BLOCK_SIZE, RunnerOptions(weights=weights))


def test_unknown_weights_and_incapable_decoders_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.weights is 'int3'"):
        ModelRunner(tiny(), 16, BLOCK_SIZE, RunnerOptions(weights="int3"))
    for weights in QUANTIZED:
        with pytest.raises(ConfigError, match=rf"{weights}, which needs engine\.decoder: fused or auto"):
            ModelRunner(tiny(), 16, BLOCK_SIZE, RunnerOptions(decoder="transformers", weights=weights))


@pytest.mark.parametrize("weights", QUANTIZED)
def test_a_model_that_loses_too_much_fails_its_check(weights: str) -> None:
    loaded = tiny()
    # One weight so large that the others of its row become zero, met by an activation that is zero.
    for layer in loaded.model.get_decoder().layers:
        with torch.no_grad():
            layer.input_layernorm.weight[0] = 0.0
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight[:, 0] = 1e4
    check_model(ModelRunner(loaded, 16, BLOCK_SIZE))
    with pytest.raises(UnsupportedModelError, match=f"with {weights} weights"):
        check_model(ModelRunner(loaded, 16, BLOCK_SIZE, RunnerOptions(weights=weights)))
