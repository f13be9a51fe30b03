"""EAGLE as a method: what it drafts is what the head says, and no token of the target changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import Draft
from baton.core.request import Request, SamplingParams
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.verification import sampling_row
from baton.engine.scheduling.scheduler import Scheduler
from decode_worker.speculation.acceptance_rules import draw_drafts
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.step_cost import StepCost
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import Unweighed
from tests.tiny_drafts import VOCAB, TinyDraft, tiny_eagle, tiny_eagle3, tiny_speculators, tiny_target

BLOCK_SIZE = 4
DRAFTS: dict[str, Callable[[], TinyDraft]] = {
    "eagle": tiny_eagle,
    "eagle3": tiny_eagle3,
    "eagle3.1": lambda: tiny_eagle3(fc_norm=True, norm_output=True),
    "two layers": lambda: tiny_speculators(num_layers=2),
}


class Setup:
    """A tiny target and a head of random weights over one cache."""

    def __init__(self, make: Callable[[], TinyDraft], folder: Path, *, draws: bool = False) -> None:
        self.untouched = tiny_target()
        target = tiny_target()
        self.head: EagleHead = load_eagle(make().write(folder), target, torch.float32, torch.device("cpu"))
        self.runner = ModelRunner(prepare_model(target, "float32"), 96, BLOCK_SIZE, draft=self.head)
        for tensor in (*self.runner.cache.keys, *self.runner.cache.values):
            tensor.fill_(torch.nan)  # whatever is read without having been written shows
        self.proposer = EagleProposer(
            FeatureState(self.head, self.runner, weights="native"), DraftPasses(StepCost()), draws=draws
        )
        self.drafted: dict[tuple[str, int], Draft] = {}

    def engine(self, *, speculate: bool, chunk_tokens: int = 32, num_blocks: int = 96) -> Engine:
        blocks = BlockManager(num_blocks, BLOCK_SIZE)
        scheduler = Scheduler(SchedulerLimits(chunk_tokens, 8, 120), blocks)
        proposer = Unweighed(self.proposer) if speculate else None
        return Engine(self.runner, scheduler, SampleAndMatch(), proposer, max_draft_tokens=5)

    def run(self, engine: Engine, prompts: list[list[int]], max_tokens: int = 20) -> list[list[int]]:
        requests = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.7 * (index % 2), seed=index)
            requests.append(Request(str(index), list(prompt), params, arrival_s=index))
            engine.scheduler.add(requests[-1])
        if engine.proposer is not None:
            self.spy(engine)
        while engine.scheduler.has_work():
            engine.step()
        assert engine.scheduler.blocks.check([]) == []
        return [request.output_token_ids for request in requests]

    def spy(self, engine: Engine) -> None:
        propose = self.proposer.propose

        def spied(plan, room):  # type: ignore[no-untyped-def]
            drafts = propose(plan, room)
            for sequence in plan:
                request = sequence.request
                if request.request_id in drafts:
                    known = (request.request_id, request.num_tokens)
                    self.drafted[known] = drafts[request.request_id]
            return drafts

        engine.proposer.propose = spied  # type: ignore[method-assign, union-attr]

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int], drafts: Sequence[int]) -> torch.Tensor:
        """Of the head behind ``token_ids`` and some drafts of its own, over the whole sequence and without any cache.

        Returns:
            ``[len(drafts) + 1, draft_vocab_size]``, one row for each draft and one for the next.
        """
        states = self.untouched(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        layers = self.head.feature_layers
        features = torch.cat([states[layer][0] for layer in layers], dim=-1)
        hidden = self.head.fuse(features)
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
def test_drafts_are_the_heads_own_and_tokens_the_targets(name: str, chunk_tokens: int, tmp_path: Path) -> None:
    setup = Setup(DRAFTS[name], tmp_path)
    texts = prompts(3, 9, 14, 6)
    plain = setup.run(setup.engine(speculate=False), texts)
    assert setup.run(setup.engine(speculate=True, chunk_tokens=chunk_tokens), texts) == plain

    assert len(setup.drafted) > 40
    for (name_of, num_tokens), draft in setup.drafted.items():
        index = int(name_of)
        known = (texts[index] + plain[index])[:num_tokens]
        expected = setup.head.to_target_ids(setup.reference_logits(known, draft.token_ids[:-1]).argmax(dim=-1))
        assert draft.token_ids == tuple(expected.tolist()), f"request {index} at {num_tokens}"


def test_the_same_under_preemption(tmp_path: Path) -> None:
    setup = Setup(tiny_eagle3, tmp_path)
    texts = prompts(9, 14, 6, 12)
    plain = setup.run(setup.engine(speculate=False), texts)
    engine = setup.engine(speculate=True, num_blocks=20)
    assert setup.run(engine, texts) == plain
    assert engine.scheduler.num_preemptions > 0


def test_drawn_drafts_are_drawn_from_the_heads_processed_distribution(tmp_path: Path) -> None:
    """The head knows 40 of the target's 96 tokens; the others have no probability."""
    setup = Setup(tiny_eagle3, tmp_path, draws=True)
    texts = prompts(9, 14)
    outputs = setup.run(setup.engine(speculate=True), texts)
    said = setup.head.to_target_ids(torch.arange(setup.head.draft_vocab_size))
    drawn = {known: draft for known, draft in setup.drafted.items() if known[0] == "1"}
    assert all(draft.probs is None for known, draft in setup.drafted.items() if known[0] == "0")
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
