"""A draft model as a method: what it drafts is what it says by itself, and no token of the target changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.draft.model.token_state import TokenState
from baton.engine.engine import Engine
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.sampler import probabilities
from baton.engine.sampling.verification import sampling_row
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.acceptance_rules import draw_drafts
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.draft_model import DraftModelProposer
from tests.drafting import BLOCK_SIZE, DraftSetup, bushy, prompts, requests_for, run
from tests.tiny_drafts import VOCAB, tiny_draft_lm, tiny_target


class DraftModelSetup(DraftSetup):
    """With a tiny draft model."""

    def __init__(
        self,
        make: Callable[[], LlamaForCausalLM] = tiny_draft_lm,
        *,
        num_blocks: int = 96,
        draws: bool = False,
        ships_prompts: bool = False,
        catch_up_rows: int = 256,
        change: Callable[[Draft], Draft] = lambda draft: draft,
    ) -> None:
        self.untouched = make()
        self.shared = min(self.untouched.config.vocab_size, VOCAB)
        self._draft = DraftModel(prepare_model(make(), "float32"), self.shared)
        self._ships_prompts = ships_prompts
        self._settings: dict[str, Any] = {"draws": draws, "catch_up_rows": catch_up_rows}
        super().__init__(tiny_target(), self._draft, num_blocks=num_blocks, change=change)

    def make_method(self) -> DraftModelProposer:
        self.state = TokenState(self._draft, self.runner, ships_prompts=self._ships_prompts)
        return DraftModelProposer(self.state, DraftPasses(StepCostModel()), **self._settings)

    @torch.inference_mode()
    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of the draft behind some tokens, without any cache; ``[1, shared]``."""
        ids = torch.tensor([token_ids]).clamp_max(self.untouched.config.vocab_size - 1)
        return self.untouched(ids).logits[0, -1:, : self.shared].float()

    @torch.inference_mode()
    def likeliest(self, known: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
        """What the draft says behind the known tokens, and behind each guess of a path but the last."""
        ids = torch.tensor([[*known, *path[:-1]]]).clamp_max(self.untouched.config.vocab_size - 1)
        logits = self.untouched(ids).logits[0, len(known) - 1 :, : self.shared]
        return tuple(logits.argmax(dim=-1).tolist())

    def check_drafts(self, requests: Sequence[Request]) -> None:
        by_id = {request.request_id: request for request in requests}
        for (name, num_tokens), draft in self.drafts.items():
            known = by_id[name].tokens_between(0, num_tokens)
            if draft.token_ids:
                assert draft.token_ids == self.likeliest(known, draft.token_ids), f"request {name} at {num_tokens}"


@pytest.mark.parametrize("chunk_tokens", [5, 32])
@pytest.mark.parametrize("draft_vocab", [VOCAB, VOCAB - 8, VOCAB + 8])
def test_drafts_match_the_draft_model_and_tokens_match_the_target(chunk_tokens: int, draft_vocab: int) -> None:
    setup = DraftModelSetup(lambda: tiny_draft_lm(vocab=draft_vocab))
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts)
    assert run(setup.speculating(chunk_tokens=chunk_tokens), requests) == plain
    assert len(setup.drafts) > 40
    setup.check_drafts(requests)


def test_a_draft_that_equals_the_target_is_always_right() -> None:
    setup = DraftModelSetup(tiny_target)
    texts = prompts(3, 9)
    params = SamplingParams(max_tokens=25, temperature=0)
    requests = [Request(str(index), text, params) for index, text in enumerate(texts)]
    run(setup.speculating(), requests)
    # One token of the prompt's own step, then four rounds of five accepted drafts and one token more.
    assert sorted(setup.recording.accepted) == [0, 0, *[5] * 8]


def test_drafts_and_tokens_match_when_accepted_nodes_are_moved() -> None:
    """KV of guesses is lost where that of a tree's nodes comes to stand, the draft's layers included."""
    setup = DraftModelSetup(tiny_target, change=bushy)
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts)
    assert run(setup.speculating(), requests) == plain
    assert 2 in setup.recording.accepted
    setup.check_drafts(requests)


def test_drafts_and_tokens_match_under_preemption() -> None:
    setup = DraftModelSetup()
    texts = prompts(9, 14, 6, 12)
    plain = run(setup.plain(), requests_for(texts))
    engine = setup.speculating(num_blocks=20)
    requests = requests_for(texts)
    assert run(engine, requests) == plain
    assert engine.scheduler.num_preemptions > 0
    setup.check_drafts(requests)


def test_drafts_and_tokens_match_beside_requests_that_forbid_speculation() -> None:
    setup = DraftModelSetup()
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts, plain=(0, 3))
    assert run(setup.speculating(), requests) == plain
    assert {name for name, _ in setup.drafts} == {"1", "2"}
    setup.check_drafts(requests)


@pytest.mark.parametrize("ships_prompts", [False, True])
def test_drafts_and_tokens_match_after_cached_prefixes_with_and_without_draft_kv(*, ships_prompts: bool) -> None:
    setup = DraftModelSetup(ships_prompts=ships_prompts)
    engine = setup.speculating()
    first = requests_for(prompts(24, 24), max_tokens=24, plain=(1,))
    run(engine, first)
    follow_ups = [[*request.tokens_between(0, 46), 7, 8, 9] for request in first]
    second = requests_for(follow_ups, max_tokens=12, prefix="again ")
    outputs = run(engine, second)
    assert all(request.num_cached_tokens >= 40 for request in second)
    assert outputs == run(setup.plain(), requests_for(follow_ups, max_tokens=12))
    setup.check_drafts([*first, *second])
    assert {name for name, _ in setup.drafts} == {"0", "again 0", "again 1"}


def test_reused_blocks_are_not_mistaken_for_draft_kv() -> None:
    """Slots that once held draft KV are given to a request that never gets any, then found as a prefix."""
    setup = DraftModelSetup(num_blocks=26)
    engine = setup.speculating()
    before = requests_for(prompts(30, 30), max_tokens=20)
    run(engine, before)
    plain = requests_for(prompts(8, 8)[1:], max_tokens=84, plain=(0,), prefix="plain ")
    run(engine, plain)
    again = requests_for([plain[0].tokens_between(0, 90)], max_tokens=12, prefix="again ")
    run(engine, again)
    assert again[0].num_cached_tokens == 88
    assert {name for name, _ in setup.drafts} == {"0", "1", "again 0"}
    setup.check_drafts(before + again)


def test_the_draft_reads_a_prompt_along_with_the_target() -> None:
    setup = DraftModelSetup(catch_up_rows=0)
    requests = requests_for(prompts(40))
    run(setup.speculating(chunk_tokens=16), requests)
    assert ("0", 41) in setup.drafts


@pytest.mark.parametrize("ships_prompts", [False, True])
def test_only_requests_that_hand_off_wait_for_long_gaps(
    *, ships_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.draft.model.token_state._MAX_GAP", 8)
    setup = DraftModelSetup(ships_prompts=ships_prompts, catch_up_rows=10)
    engine = setup.speculating()
    first = requests_for(prompts(8), max_tokens=84, plain=(0,))
    run(engine, first)
    second = requests_for([first[0].tokens_between(0, 90)], max_tokens=16, prefix="again ")
    run(engine, second)
    assert min(num_tokens for _, num_tokens in setup.drafts) == (91 if ships_prompts else 98)
    setup.check_drafts(second)


class TestImports:
    """A request whose KV came from elsewhere."""

    def imported(self, setup: DraftModelSetup, engine: Engine, state: bytes | None) -> Request:
        """Computes a prompt as a prefill worker does, then starts over with its KV; NaN is what did not come."""
        text, first = prompts(40)[0], run(setup.plain(), requests_for(prompts(40), 1))[0]
        request = Request("moved", list(text), SamplingParams(max_tokens=24, temperature=0), output_token_ids=first)
        engine.scheduler.blocks.grow(request, 40)
        source = Request("source", list(text), SamplingParams(max_tokens=1), block_ids=request.block_ids)
        for _ in range(2):
            batch = setup.runner.build_batch([ScheduledSequence(source, 20)])
            setup.runner.forward(batch)
            if state is not None:
                setup.state.computed(batch, {})
            source.num_computed_tokens += 20
        setup.state.flush("source")
        assert setup.state.export_state("source") == b""
        setup.state.release("source")
        request.num_computed_tokens = 40
        setup.state.adopt(request, state)
        return request

    def test_drafting_starts_at_once_with_draft_kv(self) -> None:
        setup = DraftModelSetup(ships_prompts=True)
        engine = setup.speculating()
        request = self.imported(setup, engine, b"")
        run(engine, [request])
        assert ("moved", 41) in setup.drafts
        setup.check_drafts([request])

    def test_drafting_catches_up_step_by_step_without_draft_kv(self) -> None:
        setup = DraftModelSetup(catch_up_rows=10)
        engine = setup.speculating()
        request = self.imported(setup, engine, None)
        run(engine, [request])
        # 41 tokens are missing, of which a round may read 16 by itself: three steps of ten rows come before it.
        assert min(num_tokens for _, num_tokens in setup.drafts) == 43
        setup.check_drafts([request])

    def test_the_state_of_another_draft_is_refused(self) -> None:
        setup = DraftModelSetup()
        with pytest.raises(ValueError, match="64 bytes was received"):
            setup.state.adopt(Request("x", [1], SamplingParams(max_tokens=1)), bytes(64))


def test_a_draft_with_a_shorter_context_stops_at_its_end() -> None:
    setup = DraftModelSetup(lambda: tiny_draft_lm(max_positions=24))
    texts = prompts(9, 14, 30)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts)
    assert run(setup.speculating(), requests) == plain
    assert {name for name, _ in setup.drafts} == {"0", "1"}
    assert max(num_tokens + len(draft) for (_, num_tokens), draft in setup.drafts.items()) == 24
    setup.check_drafts(requests)


def test_drawn_drafts_follow_the_processed_distribution_of_the_draft() -> None:
    setup = DraftModelSetup(lambda: tiny_draft_lm(vocab=VOCAB - 8), draws=True)
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=12, repetition_penalty=1.3, seed=5)
    greedy = SamplingParams(max_tokens=24, temperature=0)
    requests = [Request("drawn", prompts(9)[0], params), Request("greedy", prompts(9)[0], greedy)]
    run(setup.speculating(acceptance="residual"), requests)
    num_checked = 0
    for (name, num_tokens), draft in setup.drafts.items():
        known = requests[name == "greedy"].tokens_between(0, num_tokens)
        if name == "greedy":
            assert draft.probs is None
            continue
        assert draft.probs is not None
        assert draft.probs.shape == (len(draft), VOCAB)
        output = known[9:]
        behind = Request("drawn", known[:9], params, output_token_ids=output)
        for depth, token in enumerate(draft.token_ids):
            path = draft.token_ids[:depth]
            logits = torch.full((1, VOCAB), float("-inf"))
            logits[:, : VOCAB - 8] = setup.reference_logits([*known, *path])
            rows = [sampling_row(behind, path)]
            torch.testing.assert_close(
                draft.probs[depth][None].double(), probabilities(logits, rows), atol=1e-5, rtol=1e-4
            )
            assert [token] == draw_drafts(draft.probs[depth][None], rows)[0]
            num_checked += 1
    assert num_checked > 20


def test_penalties_of_a_greedy_request_apply_to_its_drafts() -> None:
    """Otherwise a draft repeats what the target may not."""
    setup = DraftModelSetup(tiny_target)
    params = SamplingParams(max_tokens=25, temperature=0, repetition_penalty=1.8)
    run(setup.speculating(), [Request("0", prompts(9)[0], params)])
    assert sorted(setup.recording.accepted) == [0, 5, 5, 5, 5]


def test_a_runner_without_the_draft_is_refused() -> None:
    model = DraftModel(prepare_model(tiny_draft_lm(), "float32"), VOCAB)
    with pytest.raises(ValueError, match="without this draft"):
        TokenState(model, ModelRunner(prepare_model(tiny_target(), "float32"), 8, BLOCK_SIZE))
