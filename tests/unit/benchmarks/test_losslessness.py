"""The distribution test accepts lossless methods and rejects lossy ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.loading import LoadedDraft
from baton.engine.models.model_loader import prepare_model
from benchmarks.losslessness import Case, LosslessnessSettings, _Bench, group_sizes, run
from benchmarks.speculation_target import Target
from cluster.config.config import BatonConfig
from decode_worker.speculation.verification import SampleAndMatch
from tests.tiny_drafts import tiny_eagle3, tiny_target


class Words:
    """Stands in for a tokenizer."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [5, 9, 11, 40]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    model = tiny_target()
    folder: Path = tiny_eagle3().write(tmp_path_factory.mktemp("head"))
    draft = LoadedDraft("eagle3", "head", load_eagle(folder, model, torch.float32, torch.device("cpu")))
    tokenizer: Any = Words()
    return Target(BatonConfig(), prepare_model(model, "float32"), tokenizer, draft)


@pytest.fixture(scope="module")
def bench(target: Target) -> _Bench:
    return _Bench(target, LosslessnessSettings(draws=900, seeds=3), lambda line: None)


@pytest.mark.parametrize("index", range(4))
def test_lossless_rules_pass(bench: _Bench, index: int) -> None:
    outcome = bench.test(list(bench.cases())[index])
    assert outcome.num_drafted > 900
    assert not outcome.is_suspicious


def test_every_case_reports_its_progress(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(bench, "_report", said.append)
    monkeypatch.setattr(bench, "_settings", LosslessnessSettings(draws=100, seeds=3, batch=10))
    bench.test(Case("eagle3", "match"), "2 of 4: a case")
    assert said == [f"2 of 4: a case: {count} of 100 answers" for count in range(0, 101, 5)]


def test_the_command_reports_its_results(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("benchmarks.losslessness.load_target", lambda config: target)
    run(BatonConfig(model="tiny"), said.append, draws=100, seeds=1)
    assert said[:3] == [
        "loading tiny",
        "computing the model's own probabilities of 27 answers",
        "1 of 4: lookahead, match, chains: 0 of 100 answers",
    ]
    assert said[-1].startswith("4 of 4: eagle3, residual, chains: p = ")


class AcceptsHalf(SampleAndMatch):
    """Takes the first draft of every second request, whatever the model says."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        return [
            replace(result, accepted=result.sequence.draft.token_ids[:1], nodes=(0,))
            if result.sequence.draft.token_ids and not result.accepted and int(result.sequence.request.request_id) % 2
            else result
            for result in super().verify(batch, logits)
        ]


def test_a_lossy_rule_is_detected(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.losslessness.create_verifier", lambda acceptance: AcceptsHalf())
    assert bench.test(Case("eagle3", "match")).is_suspicious


def test_every_draw_is_in_a_group_and_no_group_is_empty() -> None:
    assert group_sizes(100, 3) == [34, 33, 33]
    assert group_sizes(4, 4) == [1, 1, 1, 1]


@pytest.mark.parametrize("seeds", [0, 101])
def test_groups_without_draws_are_refused_before_anything_is_loaded(seeds: int) -> None:
    with pytest.raises(ConfigError, match=r"--seeds must be from 1 to --draws \(100\)"):
        run(BatonConfig(model="/nowhere"), lambda line: None, draws=100, seeds=seeds)
