"""The test of distributions itself: it accepts what is lossless, and notices what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.losslessness import Case, LosslessnessSettings, _Bench, group_sizes, run
from benchmarks.speculation_target import Target
from cluster.config import BatonConfig
from decode_worker.speculation.verification import SampleAndMatch
from engine.batch import ForwardBatch
from engine.draft.eagle_checkpoint import load_eagle
from engine.draft.loading import LoadedDraft
from engine.errors import ConfigError
from engine.model_loader import prepare_model
from engine.verification import VerifyResult
from tests.tiny_drafts import tiny_eagle3, tiny_target


class Words:
    """Stands in for a tokenizer."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [5, 9, 11, 40]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> _Bench:
    model = tiny_target()
    folder: Path = tiny_eagle3().write(tmp_path_factory.mktemp("head"))
    draft = LoadedDraft("eagle3", "head", load_eagle(folder, model, torch.float32, torch.device("cpu")))
    tokenizer: Any = Words()
    target = Target(BatonConfig(), prepare_model(model, "float32"), tokenizer, draft)
    return _Bench(target, LosslessnessSettings(draws=900, seeds=3), lambda line: None)


@pytest.mark.parametrize("index", range(4))
def test_lossless_rules_pass(bench: _Bench, index: int) -> None:
    outcome = bench.test(list(bench.cases())[index])
    assert outcome.num_drafted > 900
    assert not outcome.is_suspicious


class AcceptsHalf(SampleAndMatch):
    """Takes the first draft of every second request, whatever the model says."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        return [
            replace(result, accepted=result.sequence.draft.token_ids[:1], nodes=(0,))
            if result.sequence.draft.token_ids and not result.accepted and int(result.sequence.request.request_id) % 2
            else result
            for result in super().verify(batch, logits)
        ]


def test_a_lossy_rule_is_noticed(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.losslessness.create_verifier", lambda acceptance: AcceptsHalf())
    assert bench.test(Case("eagle3", "match")).is_suspicious


def test_every_draw_is_in_a_group_and_no_group_is_empty() -> None:
    assert group_sizes(100, 3) == [34, 33, 33]
    assert group_sizes(4, 4) == [1, 1, 1, 1]


@pytest.mark.parametrize("seeds", [0, 101])
def test_groups_without_draws_are_refused_before_anything_is_loaded(seeds: int) -> None:
    with pytest.raises(ConfigError, match="--seeds must be from 1 to as many as --draws, which is 100"):
        run(BatonConfig(model="/nowhere"), lambda line: None, draws=100, seeds=seeds)
