"""What requests remember of the engine's steps."""

from __future__ import annotations

from itertools import pairwise

from baton.core.request import Request
from baton.core.steps import MAX_PENDING_STEPS, EngineStep, StepShare, add_share
from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import build_engine, greedy


def step(index: int, **changes: float) -> EngineStep:
    values = {"started_s": float(index), "ended_s": index + 0.5, "busy_s": 0.5, "draft_s": 0.1}
    values |= {"num_sequences": 1, "num_tokens": 1, "num_prompt_tokens": 0, **changes}
    return EngineStep(index, **values)  # type: ignore[arg-type]


def shares_by_request(engine, requests: list[Request]) -> dict[str, list[tuple[StepShare, ...]]]:
    """For every request, the shares of each of its outputs."""
    for request in requests:
        engine.scheduler.add(request)
    found: dict[str, list[tuple[StepShare, ...]]] = {request.request_id: [] for request in requests}
    while engine.scheduler.has_work():
        for output in engine.step():
            found[output.request_id].append(output.steps)
    return found


def test_prompt_chunks_are_reported_with_the_first_token_and_later_steps_singly(runner: ModelRunner) -> None:
    engine = build_engine(runner, chunk_tokens=8)
    prompt = list(range(3, 23))
    outputs = shares_by_request(engine, [Request("r", prompt, greedy(4))])["r"]
    assert [count for _, count in outputs[0]] == [8, 8, 4]
    assert [[count for _, count in output] for output in outputs[1:]] == [[1], [1], [1]]
    steps = [entry for output in outputs for entry, _ in output]
    assert [entry.index for entry in steps] == [1, 2, 3, 4, 5, 6]
    assert all(entry.started_s < entry.ended_s for entry in steps)
    assert all(before.ended_s <= after.started_s for before, after in pairwise(steps))
    assert [entry.num_prompt_tokens for entry in steps] == [8, 8, 4, 0, 0, 0]


def test_a_step_records_its_other_requests(runner: ModelRunner) -> None:
    engine = build_engine(runner)
    outputs = shares_by_request(engine, [Request(str(n), [5 + n, 6, 7, 8], greedy(3)) for n in range(3)])
    for output in outputs.values():
        assert [(entry.num_sequences, entry.num_tokens) for entry, _ in output[0]] == [(3, 12)]
        assert [(entry.num_sequences, entry.num_tokens) for entry, _ in output[1]] == [(3, 3)]


def test_recomputation_after_a_preemption_is_recorded(runner: ModelRunner) -> None:
    engine = build_engine(runner, num_blocks=12, prefix_caching=False)
    requests = [Request(str(n), list(range(3 + n, 15 + n)), greedy(16)) for n in range(2)]
    outputs = shares_by_request(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    again = [count for output in outputs.values() for shares in output[1:] for _, count in shares if count > 1]
    assert again, "a preempted request computes what it knew already"
    assert max(again) > 12, "prompt and output"


def test_pending_steps_are_bounded_and_their_sums_are_exact() -> None:
    shares: list[StepShare] = []
    for index in range(1, 301):
        add_share(shares, step(index, num_tokens=index), 2)
    assert len(shares) == MAX_PENDING_STEPS
    assert sum(count for _, count in shares) == 600
    assert sum(entry.num_steps for entry, _ in shares) == 300
    last = shares[-1][0]
    assert (last.index, last.started_s, last.ended_s) == (300, float(MAX_PENDING_STEPS), 300.5)
    assert last.busy_s == 0.5 * last.num_steps
    assert last.num_tokens == 300
