"""Models with latent attention cache latents, and give the tokens that they give with expanded keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.core.kv_spec import KVEncoding, LayerSpec
from baton.engine.models import model_loader
from baton.engine.models.fp8_linear import Fp8Linear
from baton.engine.models.model_loader import prepare_model, relative_distance
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import BLOCK_SIZE, build_engine, build_runner, greedy, run, run_tokens, tokens_of
from tests.integration.worker_pair import Runners, pair_config, worker_pair
from tests.ranked_models import NUM_TOKENS, PROMPTS, Build, build_with_draft, divisible_model, many_ways, ranked, save
from tests.tiny_models import CONFIGS, build_model

NAMES = ("deepseek_v2", "deepseek_v3")
LATENT = LayerSpec(num_kv_heads=1, key_dim=8, value_dim=16)
EXPANDED = LayerSpec(num_kv_heads=4, key_dim=16, value_dim=12)


def expanded_runner(name: str, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    with monkeypatch.context() as patch:
        patch.setattr(model_loader, "share_latents", lambda model: None)
        return build_runner(build_model(CONFIGS[name]()), decoder="transformers")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_expanded_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    latent, expanded = build_runner(build_model(CONFIGS[name]())), expanded_runner(name, monkeypatch)
    assert latent.spec.layers == (LATENT,) * 2
    assert expanded.spec.layers == (EXPANDED,) * 2
    assert latent.spec.bytes_per_token == 2 * (8 + 16) * 4
    assert expanded.spec.bytes_per_token == 2 * 4 * (16 + 12) * 4
    assert many_ways(latent) == many_ways(expanded)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = build_model(CONFIGS[name]())
    expected = model.generate(torch.tensor([PROMPTS[-1]]), max_new_tokens=NUM_TOKENS, do_sample=False)
    runner = build_runner(model)
    assert (
        run_tokens(build_engine(runner, chunk_tokens=9), PROMPTS[-1:], NUM_TOKENS)[0]
        == expected[0, len(PROMPTS[-1]) :].tolist()
    )


@pytest.mark.parametrize("name", NAMES)
def test_int8_latents_are_close(name: str) -> None:
    runner = build_runner(build_model(CONFIGS[name]()), decoder="transformers", kv_cache="int8")
    assert runner.spec.bytes_per_token == 2 * (8 + 4 + 16 + 4)
    check_model(runner)  # compares logits with the model's own, which are computed from expanded keys and values
    assert all(len(tokens) == 5 for tokens in run_tokens(build_engine(runner), PROMPTS, 5))


def test_projections_that_attention_reads_are_not_fp8() -> None:
    config = CONFIGS["deepseek_v3"]()
    config.hidden_size, config.kv_lora_rank, config.q_lora_rank = 64, 32, 32
    config.qk_nope_head_dim = config.v_head_dim = config.qk_rope_head_dim = config.head_dim = 16
    model = build_model(config).to(torch.bfloat16)
    loaded = prepare_model(model, "bfloat16", "fp8")
    attention = loaded.model.model.layers[0].self_attn
    assert isinstance(attention.o_proj, Fp8Linear)
    assert type(attention.kv_b_proj) is torch.nn.Linear
    runner = ModelRunner(loaded, 64, BLOCK_SIZE, RunnerOptions(decoder="transformers", weights="fp8"))
    assert len(run_tokens(build_engine(runner), PROMPTS[-1:], 5)[0]) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(divisible_model("deepseek_v3"), tmp_path_factory.mktemp("model") / "deepseek_v3")


@pytest.fixture(scope="module")
def whole(folder: str) -> ModelRunner:
    return build_with_draft(Build(folder), None)[0]


@pytest.fixture(scope="module")
def divided(folder: str) -> Iterator[ModelRunner]:
    with ranked(Build(folder), 2) as (runner, _, _):
        yield runner


def test_every_rank_has_the_latents(whole: ModelRunner, divided: ModelRunner) -> None:
    assert divided.spec == whole.spec
    assert many_ways(divided) == many_ways(whole)


@pytest.mark.parametrize("encoding", KVEncoding)
def test_latents_are_exported_once(whole: ModelRunner, divided: ModelRunner, encoding: KVEncoding) -> None:
    count, parts = len(PROMPTS[-1]), []
    blocks = list(range(-(-count // BLOCK_SIZE)))
    for runner in (whole, divided):
        run(build_engine(runner, chunk_tokens=2048, prefix_caching=False), PROMPTS[-1:], greedy(1))
        parts.append(bytes(runner.cache.export_bytes(blocks, 0, count, range(2), encoding=encoding)))
    assert len(parts[0]) == len(parts[1]) == count * whole.spec.layer_bytes_per_token(0, 2, encoding)
    if encoding is KVEncoding.NATIVE:
        own, other = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts)
        assert relative_distance(other, own) < 1e-5


@pytest.mark.parametrize("sender", ["divided", "whole"])
async def test_hand_offs_between_one_rank_and_two(whole: ModelRunner, divided: ModelRunner, sender: str) -> None:
    expected = tokens_of(run(build_engine(whole), PROMPTS, greedy(NUM_TOKENS)))
    runners = Runners(divided, whole) if sender == "divided" else Runners(whole, divided)
    async with worker_pair(runners, pair_config(speculation={"method": "none"})) as pair:
        assert await pair.generate_all(PROMPTS, greedy(NUM_TOKENS)) == expected
        answer = await pair.generate(list(reversed(PROMPTS[-1])), greedy(NUM_TOKENS))
        assert answer.handoff is not None
        assert answer.handoff.num_bytes == len(PROMPTS[-1]) * whole.spec.bytes_per_token
        await pair.settle()
