"""``baton check``, and what ``baton up`` refuses by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.core.errors import ConfigError, UnsupportedModelError
from benchmarks.published_models import MODELS
from cluster.cli.cli import run
from cluster.cli.cli_check import fit_rows
from cluster.cli.cli_up import start_cluster
from cluster.config.config import BatonConfig, load_config
from cluster.config.fit_rows import FitRow
from cluster.worker import fit
from tests.quantized.make_checkpoints import FOLDER
from tests.tiny_models import CONFIGS

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a model of 8 billion parameters, without weights."""
    path = tmp_path_factory.mktemp("model")
    config = MODELS["Llama-3.1-8B"].config()
    config.dtype = "bfloat16"
    config.save_pretrained(path)
    return str(path)


def on(folder: str, gpu: str | None = "H100", gpus: float = 1, **changes: Any) -> BatonConfig:
    pool = {"resources": {"gpus": gpus, "accelerator_type": gpu}}
    return BatonConfig.from_dict({"model": folder, "prefill": pool, "decode": pool, **changes})


def prefill_row(config: BatonConfig) -> FitRow:
    return fit.FitChecker(config).row("prefill")


def test_a_model_that_fits(folder: str) -> None:
    row = prefill_row(on(folder, max_model_len=32768))
    assert row.problem == ""
    assert row.weights / 2**30 == pytest.approx(14.96, abs=0.01)
    assert row.kv_per_token == 131072
    expected = (79.1 * 2**30 * 0.9 - 2**29 - row.weights - row.step) / row.kv_per_token
    assert row.kv_tokens == pytest.approx(expected, abs=2)


def test_remedies_are_settings_with_which_it_fits(folder: str) -> None:
    config = on(folder, "A10G", max_model_len=131072)
    row = prefill_row(config)
    assert "does not fit into a KV cache of" in row.problem
    assert "prefill.resources.gpus: 2" in row.remedies
    assert f"max_model_len: {row.kv_tokens}" in row.remedies
    assert prefill_row(on(folder, "A10G", 2, max_model_len=131072)).problem == ""
    assert prefill_row(on(folder, "A10G", max_model_len=row.kv_tokens)).problem == ""


def test_fp8_helps_only_where_the_gpu_has_it(folder: str) -> None:
    large = {"max_model_len": 65536}
    assert "engine.weights: fp8" not in prefill_row(on(folder, "A10G", **large)).remedies
    assert "engine.weights: fp8" in prefill_row(on(folder, "L4", **large)).remedies


def test_weights_that_do_not_fit_at_all(folder: str) -> None:
    row = prefill_row(on(folder, "T4"))
    assert row.problem == "weights and the largest step leave no room for KV"
    assert row.remedies == ["prefill.resources.gpus: 2"]


def test_a_configured_cache_that_is_too_large(folder: str) -> None:
    config = on(folder)
    pool = {**config.to_dict()["prefill"], "kv_memory_gib": 70}
    row = prefill_row(BatonConfig.from_dict({**config.to_dict(), "prefill": pool}))
    assert row.problem == "a KV cache of 70.0 GiB does not fit beside weights and the largest step"


def test_unknown_gpus_and_cpus(folder: str) -> None:
    row = prefill_row(on(folder, None))
    assert "set prefill.resources.accelerator_type to one of T4, L4, A10G" in row.problem
    row = prefill_row(BatonConfig.from_dict({"model": folder, "prefill": {"tensor_parallel": 2}}))
    assert (row.problem, row.memory, row.hardware) == ("", 0, "CPU, 2 ranks")


def test_quantized_weights_take_their_stored_bytes_until_they_are_dequantized() -> None:
    checkpoint = FOLDER / "gptq"
    stored = prefill_row(on(str(checkpoint)))
    plain = prefill_row(on(str(checkpoint), engine={"weights": "dequantized"}))
    assert stored.weights == (checkpoint / "model.safetensors").stat().st_size
    assert plain.weights == plain.num_parameters * 2


@pytest.mark.parametrize(
    ("quantization", "weights", "message"),
    [
        ({"quant_method": "aqlm"}, "dequantized", "checkpoints of aqlm cannot be dequantized"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "fp8", "in the version gemv cannot"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "dequantized", "of gptq cannot be read"),
        ({}, "native", "Take another checkpoint"),
    ],
)
def test_what_loading_refuses_is_refused(
    tmp_path: Path, quantization: dict[str, Any], weights: str, message: str
) -> None:
    config = CONFIGS["llama"]()
    config.quantization_config = quantization
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        prefill_row(on(str(tmp_path), engine={"weights": weights}))


def test_what_no_single_change_mends_is_mended_by_a_pair(tmp_path: Path) -> None:
    config = MODELS["DeepSeek-V3"].config()
    config.dtype = "bfloat16"
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    row = prefill_row(on(str(tmp_path), "H200", 8))
    assert row.problem == "FP8 (blocks of 128 x 128) cannot be divided among ranks as it is stored"
    assert row.remedies[0] == "engine.weights: dequantized with prefill.resources.gpus: 16 (on nodes with 16)"
    assert prefill_row(on(str(tmp_path), "H200", 16, engine={"weights": "dequantized"})).problem == ""
    assert prefill_row(on(str(tmp_path), "H200", 8, engine={"weights": "dequantized"})).problem != ""


def test_a_part_of_a_gpu_that_is_too_small_becomes_a_whole_one(folder: str) -> None:
    row = prefill_row(on(folder, gpus=0.01))
    assert row.problem == "weights and the largest step leave no room for KV"
    assert row.remedies == ["prefill.resources.gpus: 1"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "hardware", "problem"),
    [
        ("H100", 0, "CPU", ""),
        (None, 0, "CPU", ""),
        (
            None,
            2,
            "2 x GPU",
            "the memory of its GPUs is not known: set prefill.resources.accelerator_type to one of T4",
        ),
        ("TPU-V9", 1, "1 x TPU-V9", "the memory of its GPUs is not known"),
        ("H100", 0.5, "0.5 x H100", ""),
    ],
)
def test_rows_name_the_hardware(folder: str, gpu: str | None, gpus: float, hardware: str, problem: str) -> None:
    row = prefill_row(on(folder, gpu, gpus))
    assert row.hardware == hardware
    assert row.problem.startswith(problem)
    assert bool(row.problem) == bool(problem)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "the config of .* could not be read"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in the config.json is 0; expected a number from 1 to 1,000"),
        ({"hidden_size": -64}, "hidden_size in the config.json is -64; expected a number from 1 to 10,000,000"),
        ({"vocab_size": 10**12}, "vocab_size in the config.json is 1000000000000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads in the config.json is 0"),
        ({"head_dim": 3}, "the shapes of LlamaForCausalLM's cache cannot be found"),
        ({"hidden_size": None}, "the config of .* could not be read.*'hidden_size' expected int"),
        ({"hidden_act": "nonsense"}, "no model can be built from the config.json .*nonsense"),
        ({"max_position_embeddings": -5}, "no context length"),
        ({"max_position_embeddings": 100}, "max_model_len is 128, but the model's context length is 100"),
        ({"model_type": "bert"}, "attends in both directions"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "needs Python code of its own"),
    ],
)
def test_configs_that_no_model_has_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    stated = {**CONFIGS["llama"]().to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises((ConfigError, UnsupportedModelError), match=f"(?s){message}"):
        fit.check(on(str(tmp_path), max_model_len=128))


def test_no_remedy_dequantizes_what_cannot_be(tmp_path: Path) -> None:
    config = MODELS["Llama-3.1-8B"].config()
    config.dtype = "bfloat16"
    for bits, helps in ((4, True), (3, False)):
        config.quantization_config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
        config.save_pretrained(tmp_path)
        remedies = prefill_row(on(str(tmp_path), "H100", 2)).remedies
        assert ("engine.weights: dequantized" in remedies, "engine.weights: fp8" in remedies) == (helps, helps)


def test_a_model_that_computes_quantized_weights_caches_no_latents(tmp_path: Path) -> None:
    config = CONFIGS["deepseek_v3"]()
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    config.save_pretrained(tmp_path)
    assert prefill_row(on(str(tmp_path))).kv_per_token == 2 * 4 * (16 + 12) * 4
    assert prefill_row(on(str(tmp_path), engine={"weights": "dequantized"})).kv_per_token == 2 * (8 + 16) * 4


def test_quantized_weights_cannot_be_divided_as_they_are_stored() -> None:
    row = prefill_row(on(str(FOLDER / "gptq"), gpus=2))
    assert row.problem == "GPTQ (4 bits) cannot be divided among ranks as it is stored"
    assert row.remedies == ["engine.weights: dequantized", "engine.weights: fp8"]
    assert prefill_row(on(str(FOLDER / "gptq"), gpus=2, engine={"weights": "dequantized"})).problem == ""


def test_the_command_prints_a_table_and_fails_if_something_does_not_fit(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(on(folder, "A10G", max_model_len=131072).to_dict()))
    assert run(["check", "-c", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "1 x A10G" in printed
    assert "8.03 billion parameters, 128 KiB of KV per token" in printed
    assert "One of these helps: prefill.resources.gpus: 2" in " ".join(printed.split())
    assert run(["check", "-c", str(file), "--set", "max_model_len=1000", "--json"]) == 0
    assert [row["pool"] for row in json.loads(capsys.readouterr().out)] == ["prefill", "decode"]


def test_errors_of_the_other_process_are_the_users(folder: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"among 12 ranks.*degrees are: 1, 2, .* 8, 16, 32\."):
        fit_rows(on(folder, gpus=12))
    with pytest.raises(ConfigError, match="nowhere"):
        fit_rows(on("/nowhere"))


def test_up_refuses_what_cannot_fit(folder: str) -> None:
    reports: list[str] = []
    with pytest.raises(ConfigError, match=r"prefill: weights and .*resources\.gpus: 2\.\ndecode: .*\n`baton check`"):
        start_cluster(on(folder, "T4"), reports.append)
    assert reports == [
        "prefill: 1 x T4 per worker, room for 0 tokens of KV",
        "decode: 1 x T4 per worker, room for 0 tokens of KV",
    ]


def test_the_gpu_example_fits(tmp_path: Path) -> None:
    """deploy/gpu-cluster.yaml, with the shapes of its model."""
    MODELS["Llama-3.1-70B"].config().save_pretrained(tmp_path)
    config = load_config(DEPLOY / "gpu-cluster.yaml", {"model": str(tmp_path)})
    for row in fit.check(config):
        assert row.problem == ""
        assert row.kv_tokens > 10 * (config.max_model_len or 0)


def test_a_check_that_takes_too_long_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.cli_check._LIMIT_S", 0.01)
    with pytest.raises(ConfigError, match=r"not known after 0\.01 s. Check the sizes"):
        fit_rows(on(folder))


def test_the_process_of_a_check_ends_with_its_parent(folder: str) -> None:
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'cluster.worker.fit', str(os.getpid())],"
        " stdin=subprocess.PIPE)\n"  # it waits for its input
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(timeout=60)
