"""Counting rounds: accepted length, acceptance by position, and what a watched method drafts."""

from __future__ import annotations

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import NO_DRAFT, ROOT, Draft
from baton.core.request import Request
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from benchmarks.speculation_rounds import NO_METHOD, RoundMeter, RoundTally, merged
from benchmarks.speculation_runs import Cell, RunResult, measure, run_batch
from decode_worker.speculation.verification import SampleAndMatch
from tests.engine_runs import build_engine, build_runner, greedy
from tests.tiny_models import random_prompts, tiny_model
from tests.toy_proposers import Oracle

MAX_DRAFT_TOKENS = 5
MAX_TOKENS = 13
CHAIN = Draft((4, 5, 6))
#  root ─ 0 ─ 1 ─ 3
#       └ 2
TREE = Draft((4, 5, 6, 7), (ROOT, 0, ROOT, 1))


def tally_of(*rounds: tuple[Draft, int, str | None]) -> RoundTally:
    tally = RoundTally()
    for draft, num_accepted, method in rounds:
        tally.add(draft, num_accepted, method)
    return tally


def test_accepted_length_counts_the_targets_own_token_and_rounds_without_drafts():
    tally = tally_of((CHAIN, 3, "ngram"), (CHAIN, 0, "ngram"), (NO_DRAFT, 0, "ngram"), (TREE, 1, "eagle"))
    assert (tally.num_rounds, tally.num_tokens, tally.num_accepted, tally.num_verified) == (4, 8, 4, 10)
    assert tally.tau == 2.0
    assert tally.by_method == {"ngram": 2, "eagle": 1, NO_METHOD: 1}


def test_acceptance_by_position_counts_drafts_that_reach_it():
    tally = tally_of((CHAIN, 3, "a"), (CHAIN, 1, "a"), (CHAIN, 0, "a"), (CHAIN.first(1), 1, "a"), (NO_DRAFT, 0, None))
    assert tally.offered == [4, 3, 3]
    assert tally.accepted == [3, 1, 1]
    assert tally.acceptance == pytest.approx([3 / 4, 1 / 3, 1 / 3])
    assert tally.reached == [4, 2, 1]
    assert tally.conditional_acceptance == pytest.approx([3 / 4, 1 / 2, 1.0])


def test_tree_positions_are_depths():
    tally = tally_of((TREE, 2, "eagle"), (TREE, 0, "eagle"))
    assert tally.offered == [2, 2, 2]
    assert tally.accepted == [1, 1, 0]
    assert tally.num_verified == 8


def test_a_position_that_was_never_reached_has_no_conditional_acceptance():
    tally = tally_of((CHAIN, 0, "a"))
    assert tally.acceptance == [0, 0, 0]
    assert tally.conditional_acceptance == [0, None, None]


def test_merging_adds_the_counts():
    rounds = [(CHAIN, 3, "a"), (CHAIN.first(1), 0, "b"), (TREE, 2, "a"), (NO_DRAFT, 0, None)]
    assert merged([tally_of(*rounds[:1]), tally_of(*rounds[1:3]), tally_of(*rounds[3:])]) == tally_of(*rounds)
    assert merged([]) == RoundTally()


def speculative(runner: ModelRunner, meter: RoundMeter) -> Engine:
    blocks = BlockManager(runner.cache.num_blocks, runner.spec.block_size, prefix_caching=False)
    scheduler = Scheduler(SchedulerLimits(64, 8, runner.loaded.max_model_len), blocks)
    return Engine(runner, scheduler, SampleAndMatch(), meter, max_draft_tokens=MAX_DRAFT_TOKENS)


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(f"request-{index}", prompt, greedy(MAX_TOKENS)) for index, prompt in enumerate(prompts)]


def truth_of(runner: ModelRunner, prompts: list[list[int]]) -> dict[str, tuple[int, ...]]:
    tokens = run_batch(build_engine(runner, prefix_caching=False), requests(prompts)).token_ids
    return {f"request-{index}": own for index, own in enumerate(tokens)}


def test_a_scripted_method_has_the_expected_counts(runner):
    """Two of five drafts are right, so that each round yields three tokens; the last has room for two drafts only."""
    prompts = random_prompts([7])
    oracle = Oracle(truth_of(runner, prompts), "half right")
    meter = RoundMeter(oracle, lambda request_id: "oracle")
    run_batch(speculative(runner, meter), requests(prompts), meter)
    tally = meter.stop()
    assert (tally.num_rounds, tally.num_tokens, tally.tau) == (4, MAX_TOKENS - 1, 3.0)
    assert (tally.num_drafted, tally.num_verified, tally.num_accepted) == (17, 17, 8)
    assert (tally.offered, tally.accepted) == ([4, 4, 3, 3, 3], [4, 4, 0, 0, 0])
    assert tally.acceptance == [1, 1, 0, 0, 0]
    assert tally.conditional_acceptance == [1, 1, 0, None, None]
    assert tally.by_method == {"oracle": 4}
    assert len(tally.draft_ms) == len(tally.verify_ms) == 4
    assert min(tally.verify_ms) > 0


def test_rounds_of_all_sequences_count(runner):
    prompts = random_prompts([7, 9, 5])
    meter = RoundMeter(Oracle(truth_of(runner, prompts), "right"))
    run_batch(speculative(runner, meter), requests(prompts), meter)
    tally = meter.stop()
    assert tally.num_tokens == 3 * (MAX_TOKENS - 1)
    assert tally.num_rounds == 3 * 2  # of six tokens each
    assert len(tally.verify_ms) == 2


def test_drafts_not_worth_verifying_count_as_drafted(runner):
    prompts = random_prompts([7])
    meter = RoundMeter(Oracle(truth_of(runner, prompts), "silent"), num_drafted=iter([10, 31]).__next__)
    run_batch(speculative(runner, meter), requests(prompts), meter)
    tally = meter.stop()
    assert (tally.num_drafted, tally.num_verified, tally.tau) == (21, 0, 1.0)
    assert tally.by_method == {NO_METHOD: MAX_TOKENS - 1}


def test_nothing_is_drafted_before_every_request_has_its_first_token(runner):
    """A long prompt takes several steps; the request that waits for it decodes without drafts until then."""
    prompts = random_prompts([4, 150])
    oracle = Oracle(truth_of(runner, prompts), "right")
    meter = RoundMeter(oracle)
    run_batch(speculative(runner, meter), requests(prompts), meter)
    first, second = ([r for r in oracle.results if r.sequence.request.request_id == f"request-{i}"] for i in (0, 1))
    assert [len(result.accepted) for result in second] == [0, 5, 5]
    before = [result for result in first if not result.num_drafted and not result.accepted]
    assert len(before) >= 3
    assert meter.stop().num_rounds == len(oracle.results) - len(before) - 1


def test_a_pair_of_runs_gets_equal_requests_and_the_first_pair_is_not_counted(runner):
    batches = [[(5, 6, 7)], [(8, 9)], [(3, 4, 5, 6)]]
    seen: list[tuple[int, ...]] = []

    class Listening(Oracle):
        def release(self, request_id: str) -> None:
            seen.append(request_id)

    meter = RoundMeter(Listening({"request-0": ()}, "silent"))
    plain = build_engine(build_runner(tiny_model("llama")), prefix_caching=False)
    result = measure(Cell("toy", "none", 0.8, 1), plain, speculative(runner, meter), meter, batches, 4)
    assert len(seen) == 4
    assert [run.token_ids for run in result.plain] == [run.token_ids for run in result.speculative]
    assert len(result.plain) == len({run.token_ids for run in result.plain}) == 3
    assert (result.num_requests, result.num_different) == (3, 0)
    assert result.tally.num_rounds == 3 * 3
    assert all(isinstance(run, RunResult) for run in result.plain)
