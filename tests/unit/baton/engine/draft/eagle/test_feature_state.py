"""Rows of hidden states across hand-offs and shared blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import VerifyResult
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.verification import PlainSampling
from tests.tiny_drafts import HIDDEN, tiny_eagle3, tiny_target

BLOCK_SIZE = 4
PROMPT = list(range(5, 17))


class Worker:
    """One engine's worth of target and head."""

    def __init__(self, folder: Path) -> None:
        target = tiny_target()
        head = load_eagle(tiny_eagle3().write(folder), target, torch.float32, torch.device("cpu"))
        self.runner = ModelRunner(prepare_model(target, "float32"), 16, BLOCK_SIZE, draft=head)
        self.state = FeatureState(head, self.runner, weights="native")

    def compute(self, request: Request) -> None:
        """All of a request's known tokens in one step."""
        count = request.num_tokens - request.num_computed_tokens
        batch = self.runner.build_batch([ScheduledSequence(request, count)])
        results = {r.sequence.request.request_id: r for r in PlainSampling().verify(batch, self.runner.forward(batch))}
        self.state.computed(batch, results)
        request.num_computed_tokens += count
        request.output_token_ids += results[request.request_id].token_ids


def request(name: str, blocks: list[int]) -> Request:
    return Request(name, list(PROMPT), SamplingParams(max_tokens=8, temperature=0), block_ids=blocks)


def arrived(source: Request, blocks: list[int]) -> Request:
    moved = request("moved", blocks)
    moved.num_computed_tokens = len(PROMPT)
    moved.output_token_ids = list(source.output_token_ids)
    return moved


def test_a_transferred_request_continues_with_the_same_row(tmp_path: Path) -> None:
    here, there = Worker(tmp_path), Worker(tmp_path)
    source = request("source", [3, 1, 2])
    here.compute(source)
    here.state.flush("source")
    moved = arrived(source, [7, 8, 9])
    there.state.adopt(moved, here.state.export_state("source"))
    before, after = here.state.waiting("source"), there.state.waiting("moved")
    assert before is not None
    assert after is not None
    assert (after.start, after.token_ids, after.first_key) == (before.start, before.token_ids, before.first_key)
    assert there.state.export_state("moved") == here.state.export_state("source")


@pytest.mark.parametrize(("is_known", "first_key"), [(True, 0), (False, 8)])
def test_only_received_blocks_have_valid_draft_kv(*, is_known: bool, first_key: int, tmp_path: Path) -> None:
    """The first two blocks were here, with draft KV or without; the last one came."""
    worker = Worker(tmp_path)
    source = request("source", [3, 1, 2])
    worker.compute(source)
    if is_known:
        worker.state.flush("source")
    moved = arrived(source, [3, 1, 9])
    worker.state.adopt(moved, bytes(4 * HIDDEN), first_new=8)
    waiting = worker.state.waiting("moved")
    assert waiting is not None
    assert waiting.first_key == first_key


def test_without_a_state_the_head_sees_only_new_tokens(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    moved = arrived(request("source", []), [7, 8, 9, 10])
    moved.output_token_ids = [4]
    worker.state.adopt(moved, None)
    assert worker.state.waiting("moved") is None
    worker.compute(moved)
    waiting = worker.state.waiting("moved")
    assert waiting is not None
    assert (waiting.start, waiting.first_key) == (12, 12)


def test_slots_are_invalid_while_their_new_rows_are_pending(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    before = request("before", [3, 1, 2])
    worker.compute(before)
    worker.state.flush("before")
    worker.state.release("before")
    worker.compute(request("owner", [3, 1, 2]))  # its rows wait
    sharing = request("sharing", [3, 1, 6])
    sharing.num_computed_tokens = 8
    worker.compute(sharing)
    waiting = worker.state.waiting("sharing")
    assert waiting is not None
    assert waiting.first_key == 8


def test_the_state_of_another_head_is_refused(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(ValueError, match="12 bytes were received"):
        worker.state.adopt(arrived(request("source", []), [7, 8, 9]), bytes(12))


def test_an_idle_state_keeps_only_the_last_row_and_continues_from_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    source = request("source", [3, 1, 2, 4, 5])
    worker.state.keep(1)
    worker.compute(source)
    waiting = worker.state.waiting("source")
    assert waiting is not None
    assert (waiting.start, len(waiting.token_ids), waiting.first_key) == (len(PROMPT) - 1, 1, len(PROMPT) - 1)


def decoded(worker: Worker, *requests: Request) -> None:
    """A step of a token for each, as the engine does it."""
    plan = [ScheduledSequence(request, 1) for request in requests]
    batch = worker.runner.build_batch(plan)
    logits = worker.runner.forward(batch)
    results = {r.sequence.request.request_id: r for r in PlainSampling().verify(batch, logits)}
    worker.state.computed(batch, results)
    for request in requests:
        request.num_computed_tokens += 1
        request.append_output(results[request.request_id].token_ids[0])


@pytest.mark.parametrize("leaves", ["is released", "is preempted"])
def test_idle_steps_keep_only_the_row_of_the_last_token(leaves: str, tmp_path: Path) -> None:
    """One row of each sequence that is still there, of its last token; from there on rows are gathered again."""
    worker = Worker(tmp_path)
    one, two = request("one", [1, 2, 3, 4, 5]), request("two", [6, 7, 8, 9, 10])
    third = request("third", [11, 12, 13, 14])
    worker.state.keep(1)
    for source in (one, two, third):
        worker.compute(source)
    for _ in range(3):
        decoded(worker, one, third, two)
    if leaves == "is released":
        worker.state.release("third")
    else:
        third.num_computed_tokens, third.block_ids = 0, []
    worker.state.keep(None)
    for source in (one, two):
        waiting = worker.state.waiting(source.request_id)
        assert waiting is not None
        assert (waiting.start, waiting.first_key) == (source.num_tokens - 2, source.num_tokens - 2)
        assert waiting.token_ids == source.output_token_ids[-1:]
    assert worker.state.waiting("third") is None
    decoded(worker, one, two)
    grown = worker.state.waiting("two")
    assert grown is not None
    assert grown.token_ids == two.output_token_ids[-2:]


def test_a_window_keeps_the_latest_rows_and_writes_none(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    source = request("source", [3, 1, 2, 4, 5])
    worker.compute(source)
    worker.state.keep(3)
    for _ in range(4):
        decoded(worker, source)
    waiting = worker.state.waiting("source")
    assert waiting is not None
    assert waiting.token_ids == source.output_token_ids[-3:]
    assert (waiting.end, waiting.first_key) == (source.num_tokens - 1, waiting.start)
    worker.state.flush("source")
    assert worker.state.waiting("source") is waiting
    assert len(waiting.token_ids) == 3
    worker.state.keep(None)
    decoded(worker, source)
    assert waiting.token_ids == source.output_token_ids[-4:]


def test_a_row_kept_while_idle_is_a_copy(tmp_path: Path) -> None:
    rested, awake = Worker(tmp_path / "rested"), Worker(tmp_path / "awake")
    states = []
    for worker in (rested, awake):
        pair = [request("one", [3, 1, 2, 4, 5]), request("two", [6, 7, 8, 9, 10])]
        pair[1].prompt_token_ids[3] = 40  # another prompt, so that the rows differ
        for source in pair:
            worker.compute(source)
        worker.state.keep(1 if worker is rested else None)
        decoded(worker, *pair)
        states.append([worker.state.export_state(source.request_id) for source in pair])
    assert states[0] == states[1]
    assert states[0][0] != states[0][1]


def test_while_idle_the_last_accepted_draft_is_the_last_row(tmp_path: Path) -> None:
    rested, awake = Worker(tmp_path / "rested"), Worker(tmp_path / "awake")
    states = []
    for worker in (rested, awake):
        one, two = request("one", [3, 1, 2, 4, 5]), request("two", [6, 7, 8, 9, 10])
        for source in (one, two):
            worker.compute(source)
        worker.state.keep(1 if worker is rested else None)
        plan = [ScheduledSequence(one, 1, Draft((7, 8, 9))), ScheduledSequence(two, 1)]
        batch = worker.runner.build_batch(plan)
        worker.runner.forward(batch)
        results = {"one": VerifyResult(plan[0], (7, 8), 30, nodes=(0, 1)), "two": VerifyResult(plan[1], (), 31)}
        worker.state.computed(batch, results)
        for result in results.values():
            source = result.sequence.request
            source.num_computed_tokens += len(result.token_ids)
            for token in result.token_ids:
                source.append_output(token)
        states.append([worker.state.export_state(source.request_id) for source in (one, two)])
        waiting = [worker.state.waiting(source.request_id) for source in (one, two)]
        assert [own.token_ids[-1] for own in waiting if own is not None] == [30, 31]
        assert [own.end for own in waiting if own is not None] == [one.num_tokens - 1, two.num_tokens - 1]
    assert states[0] == states[1]


def test_a_preempted_request_can_leave_without_a_trace(tmp_path: Path) -> None:
    """One case is a client that disconnects while its request is preempted."""
    worker = Worker(tmp_path)
    source = request("source", [3, 1, 2, 4, 5])
    worker.compute(source)
    source.block_ids = []
    worker.state.flush("source")
    worker.state.release("source")
    assert worker.state.waiting("source") is None


@pytest.mark.parametrize("length", [11, 12, 13])
def test_full_blocks_of_a_finished_request_have_complete_draft_kv(length: int, tmp_path: Path) -> None:
    """Its full blocks may be the beginning of the next conversation, wherever it ended."""
    worker = Worker(tmp_path)
    source = Request("source", PROMPT[:length], SamplingParams(max_tokens=8, temperature=0), block_ids=[3, 1, 2, 4, 5])
    worker.compute(source)
    worker.state.release("source")
    follower = Request("next", list(range(5, 30)), SamplingParams(max_tokens=8), block_ids=[3, 1, 2, 6, 7, 8, 9])
    follower.num_computed_tokens = length // BLOCK_SIZE * BLOCK_SIZE
    worker.compute(follower)
    waiting = worker.state.waiting("next")
    assert waiting is not None
    assert waiting.first_key == 0
