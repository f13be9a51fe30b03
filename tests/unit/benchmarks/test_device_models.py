"""The checks of whole models and of KV copies find planted faults. That they pass is for the device run itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.engine import Engine
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.device_run import models_part
from benchmarks.device_run.architecture_checks import compared
from benchmarks.device_run.children import run_here
from benchmarks.device_run.copies_part import measure_rates
from benchmarks.device_run.copy_checks import check_interleavings
from benchmarks.device_run.part import Setting
from tests.tiny_models import CONFIGS

CPU = torch.device("cpu")
SETTING = Setting(CPU, "tiny")


def failures(*names: str) -> list[Any]:
    rows = list(run_here(models_part.__name__, names, SETTING))
    assert rows
    return [row for row in rows if not row["ok"]]


def test_rows_report_where_tokens_differ() -> None:
    assert compared("a", [[1, 2]], [[1, 2]], drafts=3) == {"name": "a", "ok": True, "tokens": 2, "drafts": 3}
    row = compared("a", [[1], [1, 2, 4]], [[1], [1, 2, 3]])
    assert not row["ok"]
    assert row["error"] == "request 1 differs at token 2: [1, 2, 4] instead of [1, 2, 3]"


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TorchSDPA.forward

    def wrong(self: TorchSDPA, layer: int, query: Any, *others: Any) -> Any:
        return forward(self, layer, query, *others) * (1.0 if layer else 0.9)

    assert not failures("llama")
    monkeypatch.setattr(TorchSDPA, "forward", wrong)
    monkeypatch.setattr("benchmarks.device_run.architecture_checks.check_model", lambda runner: None)
    assert "llama: eager" in [row["name"] for row in failures("llama")]


def test_a_token_lost_by_overlap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.batch.batch.ForwardBatch.take_tokens", lambda *_: None)
    assert {row["name"] for row in failures("llama")} == {
        "llama: eager, overlapped",
        "llama: eager, overlapped, seeded",
    }


def test_lost_kv_of_accepted_nodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "keep_accepted", lambda *_: None)
    assert not failures("speculation by right chains")
    assert failures("speculation by right trees")


def test_a_method_that_drafts_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.speculation.medusa.MedusaProposer.propose", lambda *_: {})
    (row,) = failures("speculation by medusa trees")
    assert row["error"] == "0 drafts, of which 0 tokens were accepted: nothing was checked"


def test_every_architecture_and_method_is_checked_on_cuda() -> None:
    names = models_part.names(Setting(torch.device("cuda"), "llama-3.1-8b"))
    assert [name.removeprefix("graphs of ") for name in names if name.startswith("graphs of ")] == list(CONFIGS)
    assert {"llama", "gpt_oss", "speculation by eagle3 trees"} <= set(names)
    assert len(models_part.names(SETTING)) < len(names) / 3


def test_correct_copies_pass() -> None:
    rows = list(check_interleavings(2, CPU))
    assert [row["ok"] for row in rows] == [True, True]
    assert all(row["parts"] > 4 for row in rows)


def joins_nothing(self: PagedKVCache, imported: Any) -> None:
    pass


def import_one_further(self: PagedKVCache, block_ids: Any, start: int, end: int, *others: Any, **named: Any) -> Any:
    return import_bytes(self, block_ids, start + 1, end + 1, *others, **named)


def export_half(self: PagedKVCache, *others: Any, **named: Any) -> Any:
    data = export_bytes(self, *others, **named)
    data[: len(data) // 2] = bytes(len(data) // 2)
    return data


import_bytes, export_bytes = PagedKVCache.import_bytes, PagedKVCache.export_bytes


@pytest.mark.parametrize(
    ("name", "fault"), [("join", joins_nothing), ("import_bytes", import_one_further), ("export_bytes", export_half)]
)
def test_faulty_copies_are_found(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    monkeypatch.setattr(PagedKVCache, name, fault)
    (row,) = check_interleavings(1, CPU)
    assert not row["ok"]
    assert row["error"].endswith("tokens of moved")
    assert ("part [" in row["error"]) is (name != "export_bytes"), "what is compared has been exported as well"


def test_a_disturbed_sender_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def disturbed(self: Engine) -> Any:
        if self.scheduler.num_running == 3:
            self.runner.cache.keys[0].zero_()
        return step(self)

    monkeypatch.setattr(Engine, "step", disturbed)
    (row,) = check_interleavings(1, CPU)
    assert "tokens of" in row["error"]


def test_rates_are_measured_for_every_path_and_size() -> None:
    rows = list(measure_rates(CPU, is_tiny=True))
    assert len(rows) == 6
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_an_engine_must_end_with_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.device_run.error_checks._LIMIT_S", 1.0)
    (row,) = failures("a lost device")
    assert "the engine continued" in row["error"]

    def assert_on_device(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("benchmarks.device_run.error_checks._LIMIT_S", 30.0)
    monkeypatch.setattr(ModelRunner, "forward", assert_on_device)
    assert not failures("a lost device")
