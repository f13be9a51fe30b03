"""Timing of runs against a clock that the test moves, and the figures that follow from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.core.errors import InternalError
from baton.core.request import Request, SamplingParams, TokenOutput
from benchmarks import speculation_runs
from benchmarks.speculation_runs import Cell, CellResult, RunResult, run_batch


class ScriptedEngine:
    """Each step takes some milliseconds and gives some requests so many tokens."""

    def __init__(self, script: list[tuple[float, dict[str, int]]]) -> None:
        self.script = list(script)
        self.now_s = 100.0
        self.last_step_ran = True
        self.requests: dict[str, Request] = {}
        self.scheduler = SimpleNamespace(add=self._add, has_work=lambda: bool(self.script))

    def _add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def step(self) -> list[TokenOutput]:
        self.last_step_ran = bool(self.script)
        if not self.script:
            return []
        ms, counts = self.script.pop(0)
        self.now_s += ms / 1e3
        for name, count in counts.items():
            self.requests[name].output_token_ids += [7] * count
        return [TokenOutput(name, (7,) * count) for name, count in counts.items()]


@pytest.fixture
def timed(monkeypatch):
    def run(script: list[tuple[float, dict[str, int]]]) -> RunResult:
        engine = ScriptedEngine(script)
        monkeypatch.setattr(speculation_runs, "time", SimpleNamespace(perf_counter=lambda: engine.now_s))
        return run_batch(engine, [Request(name, [1], SamplingParams()) for name in ("a", "b")])  # type: ignore[arg-type]

    return run


def test_prefill_is_not_counted(timed):
    result = timed([(900.0, {"a": 1}), (700.0, {"a": 1, "b": 1}), (10.0, {"a": 1, "b": 1}), (10.0, {"a": 1, "b": 1})])
    assert result.tpots_ms == pytest.approx((10.0, 10.0))
    assert result.decode_ms == pytest.approx(20.0)
    assert result.num_decode_tokens == 4


def test_each_request_is_timed_to_its_own_last_token(timed):
    result = timed([(5.0, {"a": 1, "b": 1}), (12.0, {"a": 3, "b": 1}), (9.0, {"b": 1}), (9.0, {"b": 1})])
    assert result.tpots_ms == pytest.approx((4.0, 10.0))
    assert result.tpot_ms == pytest.approx(7.0)
    assert result.decode_ms == pytest.approx(30.0)
    assert result.num_decode_tokens == 6


def test_a_stalled_engine_is_an_error(timed):
    with pytest.raises(InternalError, match="can schedule nothing"):
        timed([(5.0, {"a": 1})])


def test_a_failed_request_is_an_error(timed, monkeypatch):
    failed = TokenOutput("a", error=InternalError("the model is tired"))
    monkeypatch.setattr(ScriptedEngine, "step", lambda engine: [failed])
    with pytest.raises(InternalError, match="the model is tired"):
        timed([(5.0, {"a": 1})])


def run_of(*tpots_ms: float, tokens: tuple[tuple[int, ...], ...] = ((1, 2), (3, 4))) -> RunResult:
    return RunResult(tokens, tpots_ms, 2 * max(tpots_ms), 2 * len(tpots_ms))


def test_speed_up_is_the_median_over_pairs():
    """The second pair ran while the machine was slow: both of its runs did."""
    result = CellResult(Cell("m", "w", 0.0, 2))
    result.plain = [run_of(10.0, 10.0), run_of(40.0, 40.0), run_of(10.0, 10.0)]
    result.speculative = [run_of(5.0, 5.0), run_of(16.0, 16.0), run_of(8.0, 8.0)]
    assert result.speedups == pytest.approx([2.0, 2.5, 1.25])
    assert result.speedup == pytest.approx(2.0)
    assert (result.plain_tpot_ms, result.tpot_ms) == (10.0, 8.0)
    assert result.plain_ms_per_token == pytest.approx(120 / 12)
    assert result.ms_per_token == pytest.approx(58 / 12)


def test_the_speed_up_of_a_pair_is_the_geometric_mean_over_requests():
    """One that was over with its first token says nothing."""
    result = CellResult(Cell("m", "w", 0.0, 3))
    result.plain = [RunResult(((1,),) * 3, (10.0, 10.0, None), 60.0, 6)]
    result.speculative = [RunResult(((1,),) * 3, (2.5, 10.0, None), 60.0, 6)]
    assert result.speedup == pytest.approx(2.0)


def test_requests_with_different_tokens_are_counted():
    result = CellResult(Cell("m", "w", 0.0, 2))
    result.plain = [run_of(1.0), run_of(1.0)]
    result.speculative = [run_of(1.0, tokens=((1, 2), (3, 5))), run_of(1.0)]
    assert (result.num_requests, result.num_different) == (4, 1)
