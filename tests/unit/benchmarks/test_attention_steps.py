"""The benchmark of attention backends, as far as it runs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from benchmarks import attention_steps
from benchmarks.ceilings import Ceilings
from tests.tiny_models import tiny_model

SMALL = ["--device", "cpu", "--dtype", "float32", "--contexts", "8", "--batches", "2", "--verify", "3", "--trees", "4"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(attention_steps, "measure_ceilings", lambda *_: Ceilings(1e9, 1e9, "float32"))
    return str(tmp_path / "model")


def test_every_step_is_timed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    attention_steps.main(["--model", model, *SMALL, "--prefill", "6", "--repeats", "2", "--json", str(report)])
    steps = json.loads(report.read_text())["steps"]
    assert [len(step["times_ms"]["torch_sdpa"]) for step in steps] == [2] * 4
    printed = capsys.readouterr().out
    assert "decode, batch 2, context 8" in printed
    assert "tree of 4, batch 1, context 8" in printed


@pytest.mark.parametrize("variant", ["triton_paged", "triton_paged+graphs"])
def test_what_needs_a_gpu_is_refused_without_one(model: str, variant: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA|triton cannot be imported"):
        attention_steps.main(["--model", model, *SMALL, "--variants", variant])
