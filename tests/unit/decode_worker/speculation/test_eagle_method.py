"""EAGLE as a method: what it drafts is what the head says, and no token of the target changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.core.request import Request, SamplingParams
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.sampling.verification import sampling_row
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.acceptance_rules import draw_drafts
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.proposer import EagleProposer
from tests.drafting import EagleSetup, requests_for, run
from tests.tiny_drafts import VOCAB, TinyDraft, tiny_eagle, tiny_eagle3, tiny_speculators

DRAFTS: dict[str, Callable[[], TinyDraft]] = {
    "eagle": tiny_eagle,
    "eagle3": tiny_eagle3,
    "eagle3.1": lambda: tiny_eagle3(fc_norm=True, norm_output=True),
    "two layers": lambda: tiny_speculators(num_layers=2),
}


class ChainSetup(EagleSetup):
    """An EAGLE head that drafts chains."""

    def __init__(self, make: Callable[[], TinyDraft], folder: Path, *, draws: bool = False) -> None:
        self._draws = draws
        super().__init__(make, folder)

    def make_method(self) -> EagleProposer:
        state = FeatureState(self.head, self.runner, weights="native")
        return EagleProposer(state, DraftPasses(StepCostModel()), draws=self._draws)

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int], drafts: Sequence[int]) -> torch.Tensor:
        """Of the head behind ``token_ids`` and some drafts of its own, over the whole sequence and without any cache.

        Returns:
            ``[len(drafts) + 1, draft_vocab_size]``, one row for each draft and one for the next.
        """
        hidden = self.fused_states(token_ids[:-1])
        tokens = list(token_ids[1:])
        logits: list[torch.Tensor] = []
        for draft in [*drafts, 0]:
            fed, normed = self.head(torch.tensor(tokens), hidden, torch.arange(len(tokens)))
            logits.append(self.head.logits(normed[-1:]))
            tokens.append(draft)
            hidden = torch.cat((hidden, fed[-1:]))
        return torch.cat(logits)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("chunk_tokens", [5, 32])
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_match_the_head_and_tokens_match_the_target(name: str, chunk_tokens: int, tmp_path: Path) -> None:
    setup = ChainSetup(DRAFTS[name], tmp_path)
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    assert run(setup.speculating(chunk_tokens=chunk_tokens), requests_for(texts)) == plain

    assert len(setup.drafts) > 40
    for (name_of, num_tokens), draft in setup.drafts.items():
        index = int(name_of)
        known = (texts[index] + plain[index])[:num_tokens]
        expected = setup.head.to_target_ids(setup.reference_logits(known, draft.token_ids[:-1]).argmax(dim=-1))
        assert draft.token_ids == tuple(expected.tolist()), f"request {index} at {num_tokens}"


def test_drafts_and_tokens_match_under_preemption(tmp_path: Path) -> None:
    setup = ChainSetup(tiny_eagle3, tmp_path)
    texts = prompts(9, 14, 6, 12)
    plain = run(setup.plain(), requests_for(texts))
    engine = setup.speculating(num_blocks=20)
    assert run(engine, requests_for(texts)) == plain
    assert engine.scheduler.num_preemptions > 0


def test_drawn_drafts_follow_the_processed_distribution_of_the_head(tmp_path: Path) -> None:
    """The head knows 40 of the target's 96 tokens; the others have no probability."""
    setup = ChainSetup(tiny_eagle3, tmp_path, draws=True)
    texts = prompts(9, 14)
    outputs = run(setup.speculating(), requests_for(texts))
    said = setup.head.to_target_ids(torch.arange(setup.head.draft_vocab_size))
    drawn = {known: draft for known, draft in setup.drafts.items() if known[0] == "1"}
    assert all(draft.probs is None for known, draft in setup.drafts.items() if known[0] == "0")
    assert len(drawn) > 10
    for (_, num_tokens), draft in drawn.items():
        assert draft.probs is not None
        known = (texts[1] + outputs[1])[:num_tokens]
        expected = torch.zeros(len(draft), VOCAB)
        logits = setup.reference_logits(known, draft.token_ids[:-1])
        expected[:, said] = torch.softmax(logits / 0.7, dim=-1)
        torch.testing.assert_close(draft.probs, expected, atol=1e-5, rtol=1e-4)
        params = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
        behind = Request("1", known[:14], params, output_token_ids=known[14:])
        rows = [sampling_row(behind, draft.token_ids[:depth]) for depth in range(len(draft))]
        assert [[token] for token in draft.token_ids] == draw_drafts(draft.probs, rows)
