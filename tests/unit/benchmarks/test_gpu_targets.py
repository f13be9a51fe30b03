"""The figures for GPUs, with a tiny model on the CPU: all are there, and made of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_targets
from benchmarks.ceilings import Ceilings
from benchmarks.gpu_targets import Figure, Plan, make_model, measure_beside, measure_steps
from benchmarks.offline.protocol import Generate
from engine.model_loader import prepare_model
from engine.model_runner import ModelRunner

PLAN = Plan(context=32, batch=3, prefill=48, verify=4, output=4)
CPU = torch.device("cpu")


def test_there_is_room_for_each_work_alone() -> None:
    assert Plan(context=32, batch=3, prefill=48, verify=4, output=4).num_blocks == 1 + 3 * 9
    assert Plan(context=160, batch=2, prefill=48, verify=4, output=4).num_blocks == 1 + 2 * 11
    assert Plan(context=32, batch=2, prefill=4800, verify=4, output=4).num_blocks == 1 + 300


@pytest.mark.parametrize(
    ("value", "is_most", "is_met"), [(1.1, True, True), (1.2, True, False), (1.1, False, True), (1.0, False, False)]
)
def test_targets_are_most_or_least(value: float, is_most: bool, is_met: bool) -> None:
    assert Figure("", value, 1.1, is_most, "").is_met == is_met


def test_shares_are_of_what_the_device_allows() -> None:
    runner = ModelRunner(prepare_model(make_model("tiny", CPU, torch.float32), "float32"), PLAN.num_blocks, 16)
    slow = measure_steps(runner, Ceilings(1e6, 1e6, "float32"), PLAN, 3)
    fast = measure_steps(runner, Ceilings(1e15, 1e15, "float32"), PLAN, 3)
    assert [figure.target for figure in slow] == [0.85, 0.70, 0.60, 1.1]
    assert [figure.is_met for figure in slow[:3]] == [True] * 3
    assert [figure.is_met for figure in fast[:3]] == [False] * 3
    assert slow[0].name == "decode, batch 1, context 32: share of the bandwidth"
    assert slow[2].name == "prefill 48: share of the matrix rate"


def engine(log: list[str], name: str, num_tokens: int = PLAN.output) -> Generate:
    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        assert [len(prompt) for prompt in prompts] == [128] * PLAN.batch
        assert max_tokens == PLAN.output
        log.append(name)
        return [num_tokens] * len(prompts)

    return generate


def test_engines_take_turns_and_must_give_what_was_asked_for() -> None:
    log: list[str] = []
    figure = measure_beside({"ours": engine(log, "a"), "theirs": engine(log, "b")}, PLAN, 2, 100)
    assert log == ["a", "b"] * 4
    assert figure.name == "3 requests of 128 tokens, 4 out: ours × theirs"
    assert figure.value > 0
    with pytest.raises(RuntimeError, match="where 4 were asked for"):
        measure_beside({"ours": engine(log, "a"), "theirs": engine(log, "b", 3)}, PLAN, 2, 100)


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_targets", "--json", "/nowhere/a.json"])
    with pytest.raises(SystemExit):
        gpu_targets.main()
    assert "there is no folder /nowhere" in capsys.readouterr().err


def test_the_whole_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--shape tiny --device cpu --dtype float32 --context 32 --batch 2 --prefill 48 --verify 4 --output 4"
    monkeypatch.setattr(
        "sys.argv", ["gpu_targets", *options.split(), "--repeats", "1", "--rounds", "1", "--json", str(tmp_path / "a")]
    )
    monkeypatch.setattr(gpu_targets, "measure_ceilings", lambda dtype, device: Ceilings(1e9, 1e9, "float32"))
    gpu_targets.main()
    report = json.loads((tmp_path / "a").read_text(encoding="utf-8"))
    assert len(report["figures"]) == 5
    assert report["figures"][-1]["value"] > 0
    assert "baton × transformers" in capsys.readouterr().out
