"""Greedy tokens through the paged engine equal ``transformers.generate``, token for token, for every architecture.

And what cannot be served is refused with a reason, never served wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.models.model_loader import load_model, prepare_model
from baton.engine.models.model_source import ModelSource
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.architectures import KIND_OF
from tests.engine_runs import BLOCK_SIZE, build_engine, build_runner, greedy, run, run_tokens
from tests.tiny_models import CONFIGS, WINDOW, build_model, model_with_reference, random_prompts, tiny_model

NUM_TOKENS = 14  # from any prompt past a window, and over four blocks
PROMPTS = random_prompts((1, 2, 3, 5, 8, 9, 16, 17, 23, 31, 32, 33, 40, 47, 55, 60))
ALONE = (0, 15)
HALVES = (("bfloat16", "transformers"), ("float16", "auto"), ("bfloat16", "auto"))
HALVED = ("gemma2", "gpt_oss", "deepseek_v3", "mixtral", "gpt2")
"""Architectures that the fused decoder does not know: transformers computes them with any setting."""
CHUNKS = pytest.mark.parametrize(
    "chunk_tokens", [*(pytest.param(n, marks=pytest.mark.thorough(covered_by="[2048]")) for n in (16, 64)), 2048]
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny matrices lose more to the thread pool than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Case:
    runner: ModelRunner
    expected: list[list[int]]


DECODERS = [*((name, "auto") for name in sorted(CONFIGS)), ("llama", "transformers"), ("qwen3", "transformers")]


def _decoder_param(name: str, decoder: str) -> pytest.ParameterSet:
    """``make test`` generates tokens with one architecture of each kind; the self-check runs with all."""
    kind = KIND_OF[name]
    marks = () if name == kind else pytest.mark.thorough(covered_by=f"[{kind}-{decoder}]")
    return pytest.param((name, decoder), id=f"{name}-{decoder}", marks=marks)


@pytest.fixture(scope="module", params=[_decoder_param(*each) for each in DECODERS])
def case(request: pytest.FixtureRequest) -> Case:
    name, decoder = request.param
    model, expected = model_with_reference(name, PROMPTS, NUM_TOKENS)
    return Case(build_runner(model, decoder=decoder), expected)


def test_llama_like_models_use_the_fused_decoder() -> None:
    fused = {name for name in CONFIGS if build_runner(tiny_model(name)).is_fused}
    assert fused == {"llama", "llama_yarn", "ministral3", "qwen2", "qwen3"}


@pytest.mark.parametrize(("name", "decoder"), DECODERS, ids="-".join)
def test_the_self_check_passes_for_every_architecture(name: str, decoder: str) -> None:
    """The self-check compares logits over the paged cache with those of the model alone, for every architecture."""
    check_model(build_runner(tiny_model(name), decoder=decoder))


@CHUNKS
def test_sixteen_concurrent_requests_match_transformers_with_and_without_prefix_hits(
    case: Case, chunk_tokens: int
) -> None:
    engine = build_engine(case.runner, chunk_tokens=chunk_tokens)
    assert run_tokens(engine, PROMPTS, NUM_TOKENS) == case.expected

    again = run(engine, PROMPTS, greedy(NUM_TOKENS))
    assert [outcome.token_ids for outcome in again] == case.expected
    for prompt, outcome in zip(PROMPTS, again, strict=True):
        reusable = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert outcome.outputs[-1].num_cached_tokens == reusable
    assert engine.scheduler.blocks.check([]) == []


@pytest.mark.parametrize(
    "chunk_tokens", [16, *(pytest.param(n, marks=pytest.mark.thorough(covered_by="[16]")) for n in (64, 2048))]
)
def test_single_requests_match_transformers(case: Case, chunk_tokens: int) -> None:
    for index in ALONE:
        engine = build_engine(case.runner, chunk_tokens=chunk_tokens, prefix_caching=False)
        assert run_tokens(engine, [PROMPTS[index]], NUM_TOKENS) == [case.expected[index]]


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.thorough(covered_by="[True]"))])
def test_preempted_requests_match_transformers(case: Case, prefix_caching: bool) -> None:
    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    engine = build_engine(
        case.runner, chunk_tokens=32, num_blocks=longest // BLOCK_SIZE + 3, prefix_caching=prefix_caching
    )
    assert run_tokens(engine, PROMPTS, NUM_TOKENS) == case.expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.blocks.check([]) == []


def test_the_matrix_covers_all_supported_architectures() -> None:
    promised = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2"}
    assert promised | {"mixtral", "gpt_oss", "deepseek_v3"} <= CONFIGS.keys()


def test_windows_match_the_masks_of_the_models() -> None:
    def windows(name: str) -> list[int | None]:
        return [layer.sliding_window for layer in prepare_model(tiny_model(name), "float32").attention_layers]

    assert windows("mistral") == [WINDOW, WINDOW]
    assert windows("gemma2") == [WINDOW, None]
    assert windows("qwen2_window") == [None, WINDOW]
    assert windows("phimoe") == [WINDOW, WINDOW], "slides without telling its attention"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_saved_folder_loads_and_generates_the_same(name: str, tmp_path: Path) -> None:
    model, expected = model_with_reference(name, PROMPTS, NUM_TOKENS)
    fingerprint = prepare_model(model, "float32").fingerprint
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)

    loaded = load_model(ModelSource(str(tmp_path), name), "auto", CPU)

    assert loaded.dtype_name == "float32"
    assert loaded.fingerprint == fingerprint
    engine = build_engine(ModelRunner(loaded, 512, BLOCK_SIZE))
    assert run_tokens(engine, PROMPTS, NUM_TOKENS) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "decoder"),
    [
        *(("llama", dtype, decoder) for dtype, decoder in HALVES),
        *((name, "bfloat16", "transformers") for name in HALVED),
        *(
            pytest.param(name, dtype, "auto", marks=pytest.mark.thorough(covered_by=f"[{name}-bfloat16-transformers]"))
            for name in HALVED
            for dtype in ("float16", "bfloat16")
        ),
    ],
)
def test_half_precision_passes_the_self_check(name: str, dtype: str, decoder: str) -> None:
    model = tiny_model(name).to(getattr(torch, dtype))
    check_model(ModelRunner(prepare_model(model, dtype), 16, BLOCK_SIZE, RunnerOptions(decoder=decoder)))


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 of the weights of LlamaForCausalLM, such as lm_head\.weight"):
        load_model(ModelSource(str(tmp_path), "headless"), "auto", CPU)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be read"):
        load_model(ModelSource(str(tmp_path / "nothing"), "nothing"), "auto", CPU)


def test_the_context_length_ends_before_longrope_changes_cached_keys() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    settings = {**CONFIGS["phi3"]().to_dict(), "rope_parameters": rope, "original_max_position_embeddings": 48}
    loaded = prepare_model(build_model(transformers.Phi3Config(**settings)), "float32")
    assert loaded.max_model_len == 48


# --- what is refused -------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _small(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    config_class: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    return lambda: config_class(**{**_SMALL, **settings})


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "mamba": (_small("MambaConfig"), "linear_attention"),
    "jamba": (_small("JambaConfig", num_experts=2), "linear_attention"),
    "recurrent_gemma": (_small("RecurrentGemmaConfig"), "linear_attention"),
    "qwen3_next": (_small("Qwen3NextConfig"), "linear_attention"),
    "lfm2": (_small("Lfm2Config", full_attn_idxs=[0]), "conv"),
    "rwkv": (_small("RwkvConfig"), "never called its attention interface"),
    "llama4": (_small("Llama4TextConfig", attention_chunk_size=8), "chunked attention"),
    "bloom": (_small("BloomConfig", n_head=4), "never called its attention interface"),
    "mpt": (_small("MptConfig", d_model=32, n_heads=4, n_layers=2), "never called its attention interface"),
    "falcon_alibi": (_small("FalconConfig", alibi=True), "never called its attention interface"),
    "gptj": (_small("GPTJConfig", n_embd=32, n_layer=2, n_head=4, rotary_dim=4), "never called its attention"),
    "xlnet": (_small("XLNetConfig", d_model=32, n_layer=2, n_head=4, d_inner=32), "XLNetLMHeadModel"),
    "doge": (_small("DogeConfig"), "its own bias or mask"),
    "diffllama": (_small("DiffLlamaConfig"), "more than once"),
    "bert": (_small("BertConfig"), "in both directions"),
    "roberta": (_small("RobertaConfig"), "in both directions"),
    "t5": (_small("T5Config", d_model=32, num_layers=2, num_heads=4), "encoder-decoder"),
    "bart": (_small("BartConfig", d_model=32, decoder_layers=2, decoder_ffn_dim=32), "encoder-decoder"),
    "vit": (_small("ViTConfig"), "no causal language model"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unsupported_architecture_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    build_config, reason = REFUSED[name]
    config = build_config()
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_config().save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(ModelSource(str(tmp_path), name), "float32", CPU)


class _AveragingMLP(nn.Module):
    """Keeps state outside the KV cache, where no probe can see it: adds a running mean over the sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.share = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, hidden.shape[1] + 1)[None, :, None]
        return self.inner(hidden) + self.share * hidden.cumsum(dim=1) / counts


def _with_hidden_state(model: PreTrainedModel) -> PreTrainedModel:
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[0].mlp = _AveragingMLP(model.model.layers[0].mlp)
    return model


def _with_ignored_positions(model: PreTrainedModel) -> PreTrainedModel:
    """Counts positions from 0 in every call."""
    assert isinstance(model, LlamaForCausalLM)
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, torch.arange(position_ids.shape[1])[None])
    return model


def _with_a_little_hidden_state(model: PreTrainedModel) -> PreTrainedModel:
    """The damage is as small as the error of an int8 cache."""
    damaged = _with_hidden_state(model)
    damaged.model.layers[0].mlp.share = 0.03
    return damaged


@pytest.mark.parametrize("kv_cache", ["native", "int8"])
@pytest.mark.parametrize("damage", [_with_hidden_state, _with_a_little_hidden_state, _with_ignored_positions])
def test_the_self_check_catches_what_the_probe_misses(
    damage: Callable[[PreTrainedModel], PreTrainedModel], kv_cache: str
) -> None:
    runner = build_runner(damage(tiny_model("llama")), decoder="transformers", kv_cache=kv_cache)
    with pytest.raises(UnsupportedModelError, match="different logits with the paged cache"):
        check_model(runner)


def test_the_self_check_reports_a_failing_forward() -> None:
    runner = build_runner(tiny_model("llama"))

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("shapes do not match")

    runner.loaded.model.forward = fail
    with pytest.raises(UnsupportedModelError, match="RuntimeError: shapes do not match"):
        check_model(runner)
