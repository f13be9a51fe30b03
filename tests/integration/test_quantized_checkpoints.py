"""Checkpoints of every scheme give the tokens that transformers generates from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton import LLM, SamplingParams
from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.kv_cache.paged_cache import Allocator
from baton.engine.models.model_loader import load_config, load_model, own_logits, prepare_model, relative_distance
from baton.engine.models.model_source import ModelSource
from baton.engine.models.model_weights import load_weights
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from tests.engine_runs import BLOCK_SIZE, build_engine, run_tokens
from tests.quantized.make_checkpoints import FOLDER, NUM_TOKENS, PROMPT
from tests.ranked_models import CPU, joined
from tests.tiny_tokenizers import byte_level_tokenizer

EXPECTED: Mapping[str, Mapping[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
SCHEMES = sorted(EXPECTED)
IN_FLOAT32 = [name for name in SCHEMES if EXPECTED[name]["weights_dtype"] == "float32"]
HERE = [name for name in SCHEMES if not name.startswith(("awq", "gptq"))]
"""Schemes whose library is installed for the tests; that of the others needs another version of torch."""
AS_STORED = [name for name in HERE if "native" in EXPECTED[name]]
IN_BFLOAT16 = [name for name in HERE if name.startswith(("bitsandbytes", "fp8"))]
"""Schemes that transformers computes in bfloat16 only."""


def source(name: str) -> ModelSource:
    return ModelSource(str(FOLDER / name), name)


def tokens_of(model: Any) -> list[int]:
    """The continuation of the prompt, by the engine."""
    loaded = prepare_model(model.eval(), str(model.dtype).removeprefix("torch."))
    runner = ModelRunner(loaded, 64, BLOCK_SIZE, RunnerOptions(decoder="transformers"))
    return run_tokens(build_engine(runner), [PROMPT], NUM_TOKENS)[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_dequantized_weights_give_the_tokens_of_transformers(name: str) -> None:
    dtype = getattr(torch, EXPECTED[name]["weights_dtype"])
    model = load_weights(source(name), load_config(source(name)), dtype, CPU, "dequantized")
    assert model.dtype is dtype
    assert tokens_of(model.float()) == EXPECTED[name]["dequantized"]


@pytest.mark.parametrize("name", AS_STORED)
def test_stored_weights_give_the_tokens_of_transformers(name: str) -> None:
    model = load_weights(source(name), load_config(source(name)), torch.float32, CPU)
    assert tokens_of(model) == EXPECTED[name]["native"]


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_stored_weights_give_the_logits_of_transformers(name: str) -> None:
    loaded = load_model(source(name), "auto", CPU)
    assert loaded.dtype_name == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.bfloat16, attn_implementation="eager")
    expected = model(torch.tensor([PROMPT])).logits[0].float()
    # CPUs add products of bfloat16 in different orders; ten of its roundings are far below an error of the scheme.
    assert relative_distance(own_logits(loaded.model, PROMPT), expected) < 10 * 2**-8
    assert len(tokens_of(loaded.model)) == NUM_TOKENS


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_the_fused_decoder_takes_dequantized_weights(name: str) -> None:
    loaded = load_model(source(name), "float32", CPU, "dequantized")
    runner = ModelRunner(loaded, 64, BLOCK_SIZE, RunnerOptions(decoder="fused", weights="dequantized"))
    assert run_tokens(build_engine(runner), [PROMPT], NUM_TOKENS)[0] == EXPECTED[name]["dequantized"]


def test_the_engine_alone_takes_them(tmp_path: Path) -> None:
    checkpoint = tmp_path / "gptq"
    checkpoint.mkdir()
    for file in (FOLDER / "gptq").iterdir():
        (checkpoint / file.name).symlink_to(file)
    byte_level_tokenizer().save(checkpoint)
    llm = LLM(str(checkpoint), dtype="float32", weights="dequantized", kv_blocks=20)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert list(llm.generate([PROMPT], params)[0].token_ids) == EXPECTED["gptq"]["dequantized"]


def test_fp8_starts_from_dequantized_weights() -> None:
    plain = load_model(source("fp8-block"), "bfloat16", CPU, "dequantized")
    again = load_model(source("fp8-block"), "bfloat16", CPU, "fp8")
    assert again.weights == "fp8"
    assert again.fingerprint == plain.fingerprint
    assert 0 < again.weights_error < 0.2


@pytest.fixture(scope="module")
def divided() -> Iterator[dict[str, torch.Tensor]]:
    with joined(logits_of_all, None, 2) as (group, _):
        found = {name: logits_of(name, group) for name in SCHEMES}
        runner(group)
        yield found


def logits_of(name: str, group: RankGroup | None) -> torch.Tensor:
    return own_logits(load_model(source(name), "float32", CPU, "dequantized", group).model, PROMPT)


def runner(group: RankGroup) -> ModelRunner:
    loaded = load_model(source(SCHEMES[0]), "float32", CPU, "dequantized", group)
    return ModelRunner(loaded, 1, BLOCK_SIZE, RunnerOptions(decoder="transformers"))


def logits_of_all(argument: None, group: RankGroup, device: torch.device, allocate: Allocator) -> ModelRunner:
    """What the follower computes beside ``divided``."""
    torch.set_num_threads(1)
    for name in SCHEMES:
        logits_of(name, group)
    return runner(group)


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_dequantize_their_own_parts(divided: dict[str, torch.Tensor], name: str) -> None:
    assert relative_distance(divided[name], logits_of(name, None)) < 1e-5


def test_stored_weights_cannot_be_divided() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPTQ \(4 bits\).*engine.weights: dequantized"):
        load_weights(source("gptq"), load_config(source("gptq")), torch.float32, CPU, divided=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["compressed-w8a8", "fp8-block", "bitsandbytes-int8", "bitsandbytes-nf4"])
@pytest.mark.parametrize("weights", ["native", "dequantized"])
def test_codes_are_not_taken_for_weights(tmp_path: Path, name: str, weights: str) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / name / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"weight is (I8|U8|F8_E4M3), but the config has no quantization_c"):
        load_model(ModelSource(str(tmp_path), name), "float32", CPU, weights)


Q = "model.layers.0.self_attn.q_proj."


def state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Changes the description of a weight of bitsandbytes."""

    def change(stored: torch.Tensor) -> torch.Tensor:
        text = json.dumps({**json.loads(bytes(stored.tolist())), **changes})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def without(stored: torch.Tensor) -> None:
    """Removes a tensor."""


STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = [
    ("fp8-block", "weight_scale_inv", lambda scale: scale[:2], r"needs \[4, 2\]"),
    ("fp8-block", "weight_scale_inv", lambda scale: scale.to(torch.int64), r"is I64; expected F32"),
    ("compressed-w8a8", "weight_scale", lambda scale: scale[:64], r"has the shape \[64, 1\]"),
    ("compressed-w4a16-asymmetric", "weight_zero_point", without, r"weight_zero_point is missing"),
    ("compressed-w4a16", "weight_scale", without, r"lacks weight_scale"),
    ("compressed-w4a16", "weight_packed", lambda words: words.to(torch.int8), r"is I8; expected I32"),
    ("compressed-w4a16", "weight_shape", lambda shape: shape * 1_000_000, r"are packed into"),
    ("compressed-w4a16", "weight_shape", lambda shape: shape[:1], r"ValueError: not enough values"),
    ("bitsandbytes-int8", "SCB", lambda scale: scale[:64], r"needs \[128, 1\]"),
    ("bitsandbytes-nf4", "weight.nested_absmax", without, r"nested_absmax of its nested scales are missing"),
    ("bitsandbytes-nf4", "weight.absmax", lambda scale: scale.float(), r"is F32; expected U8"),
    ("bitsandbytes-nf4", STATE, state(dtype="load"), r"the dtype is 'load'"),
    ("bitsandbytes-nf4", STATE, state(blocksize=0), r"0 is not a positive whole number"),
    ("bitsandbytes-nf4", STATE, state(nested_blocksize=2**40, blocksize=128), r"weight.absmax has the shape"),
    ("bitsandbytes-nf4", STATE, lambda stored: stored[:5], r"JSONDecodeError"),
    ("bitsandbytes-nf4", STATE, state(shape=[128]), r"ValueError"),
    ("gptq", "g_idx", lambda groups: groups - 1, r"groups that do not exist"),
    ("gptq", "g_idx", lambda groups: groups + 1, r"groups that do not exist"),
    ("gptq", "scales", lambda scale: scale[:1], r"scales has the shape \[1, 128\]"),
    ("gptq", "qweight", lambda words: words.to(torch.int16), r"is I16; expected I32"),
    ("awq", "scales", lambda scale: scale[:1], r"scales has the shape \[1, 128\]"),
    ("awq", "qzeros", without, r"lacks qzeros"),
]


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    DAMAGES,
    ids=[f"{name}-{suffix}-{index}" for index, (name, suffix, _, _) in enumerate(DAMAGES)],
)
def test_damage_is_named(
    tmp_path: Path, name: str, suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    (tmp_path / "config.json").symlink_to(FOLDER / name / "config.json")
    tensors = load_file(FOLDER / name / "model.safetensors")
    changed = change(tensors.pop(Q + suffix))
    if changed is not None:
        tensors[Q + suffix] = changed.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"self_attn.q_proj.*{message}"):
        load_model(ModelSource(str(tmp_path), name), "float32", CPU, "dequantized")


@pytest.mark.parametrize("quantization", [[], "fp8", 7, {"quant_method": ["fp8"]}, {"quant_method": None}])
@pytest.mark.parametrize("weights", ["native", "dequantized"])
def test_settings_of_another_kind_are_refused(tmp_path: Path, quantization: Any, weights: str) -> None:
    config = json.loads((FOLDER / "gptq/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / "gptq/model.safetensors")
    with pytest.raises((ConfigError, UnsupportedModelError)):
        load_model(ModelSource(str(tmp_path), "x"), "float32", CPU, weights)


def test_a_config_of_another_size_is_named(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "gptq/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / "gptq/model.safetensors")
    with pytest.raises(ConfigError, match=r"has the shape \(128, 64\), but its config needs \(256, 64\)"):
        load_model(ModelSource(str(tmp_path), "x"), "float32", CPU, "dequantized")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"AWQ \(4 bits\).*gptqmodel.*engine.weights: dequantized"):
        load_model(source("awq"), "float32", CPU)


def test_another_dtype_than_that_of_the_quantizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"computes in bfloat16, not in float32.*engine.weights: dequantized"):
        load_model(source("bitsandbytes-nf4"), "float32", CPU)


def test_the_library_of_int8_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = load_weights(source("bitsandbytes-int8"), load_config(source("bitsandbytes-int8")), torch.bfloat16, CPU)
    with torch.inference_mode():
        model(torch.tensor([PROMPT]))
    assert "MatMul8bitLt" not in caplog.text
