"""Medusa heads as a method: what they draft is what they say, and no token of the target changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.core.drafts import Draft, ScheduledSequence, depths_of
from baton.core.request import Request, SamplingParams
from baton.engine.draft.medusa.heads import MedusaHeads, load_medusa
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.medusa import MedusaProposer, best_choices
from decode_worker.speculation.tree import children_of
from tests.drafting import BLOCK_SIZE, DraftSetup, bushy, engine_over, prompts, requests_for, run
from tests.tiny_drafts import HIDDEN, VOCAB, TinyDraft, tiny_medusa_v1, tiny_medusa_vllm, tiny_target

NUM_HEADS = 3
NUM_RANKS = 6


def forgetful_target() -> LlamaForCausalLM:
    """Each token depends on the one before it alone."""
    target = tiny_target()
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return target


@torch.inference_mode()
def orbit(target: LlamaForCausalLM, token: int, length: int) -> list[int]:
    """What a forgetful target says greedily, ``token`` first."""
    tokens = [token]
    while len(tokens) < length:
        tokens.append(int(target(torch.tensor([[tokens[-1]]])).logits[0, -1].argmax()))
    return tokens


@torch.inference_mode()
def teach(heads: MedusaHeads, target: LlamaForCausalLM, tokens: Sequence[int]) -> None:
    """Makes the heads right about every token of ``tokens``."""
    hidden = target.model(torch.tensor([tokens])).last_hidden_state[0]
    for index, block in enumerate(heads.blocks):
        for parameter in block.parameters():
            parameter.zero_()
        known = {tokens[place]: tokens[place + 2 + index] for place in range(len(tokens) - 2 - index)}
        rows = torch.stack([hidden[tokens.index(token)] for token in known])
        wanted = 20.0 * torch.nn.functional.one_hot(torch.tensor(list(known.values())), VOCAB)
        heads.lm_heads[index].weight.copy_(torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T)


class MedusaSetup(DraftSetup):
    """With Medusa heads of random weights."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[], TinyDraft] = tiny_medusa_v1,
        make_target: Callable[[], LlamaForCausalLM] = tiny_target,
        change: Callable[[Draft], Draft] = lambda draft: draft,
    ) -> None:
        self.untouched, target = make_target(), make_target()
        self.heads = load_medusa(make().write(folder), target, torch.float32, torch.device("cpu"))
        super().__init__(target, self.heads, change=change)

    def make_method(self) -> MedusaProposer:
        self.state = MedusaState(self.heads, self.runner)
        return MedusaProposer(self.state, DraftPasses(StepCostModel()))

    @torch.inference_mode()
    def candidates(self, known: Sequence[int]) -> list[list[int]]:
        """The likeliest tokens of each head behind ``known``, computed without any cache."""
        hidden = self.untouched.model(torch.tensor([known[:-1]])).last_hidden_state[0, -1]
        tokens: list[list[int]] = self.heads.to_target_ids(self.heads(hidden).topk(NUM_RANKS).indices).tolist()
        return tokens

    def check_drafts(self, requests: Sequence[Request]) -> None:
        """Every node is one of its own head's candidates, and siblings differ."""
        by_id = {request.request_id: request for request in requests}
        for (name, num_tokens), draft in self.drafts.items():
            candidates = self.candidates(by_id[name].tokens_between(0, num_tokens))
            parents = [draft.parent(node) for node in range(len(draft))]
            for token, depth in zip(draft.token_ids, depths_of(parents), strict=True):
                assert token in candidates[depth], f"request {name} at {num_tokens}"
            for siblings in children_of(draft).values():
                assert len({draft.token_ids[node] for node in siblings}) == len(siblings)


@pytest.mark.parametrize("chunk_tokens", [5, 32])
@pytest.mark.parametrize("make", [tiny_medusa_v1, tiny_medusa_vllm])
def test_drafts_match_the_heads_and_tokens_match_the_target(
    make: Callable[[], TinyDraft], chunk_tokens: int, tmp_path: Path
) -> None:
    setup = MedusaSetup(tmp_path, make)
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts)
    assert run(engine_over(setup.runner, setup.recording, chunk_tokens=chunk_tokens), requests) == plain
    assert len(setup.drafts) > 40
    assert any(not draft.is_chain for draft in setup.drafts.values())
    setup.check_drafts(requests)


def test_drafts_and_tokens_match_under_preemption(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path)
    texts = prompts(9, 14, 6, 12)
    plain = run(setup.plain(), requests_for(texts))
    engine = engine_over(setup.runner, setup.recording, num_blocks=20)
    requests = requests_for(texts)
    assert run(engine, requests) == plain
    assert engine.scheduler.num_preemptions > 0
    setup.check_drafts(requests)


def test_drafts_and_tokens_match_beside_requests_that_forbid_speculation(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path)
    texts = prompts(3, 9, 14, 6)
    plain = run(setup.plain(), requests_for(texts))
    requests = requests_for(texts, plain=(0, 3))
    assert run(engine_over(setup.runner, setup.recording), requests) == plain
    assert {name for name, _ in setup.drafts} == {"1", "2"}
    setup.check_drafts(requests)


def test_drafts_and_tokens_match_after_a_cached_prefix(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path)
    engine = engine_over(setup.runner, setup.recording)
    first = requests_for(prompts(24))
    run(engine, first)
    follow_ups = [[*first[0].tokens_between(0, 42), 7, 8, 9]]
    second = requests_for(follow_ups, prefix="again ")
    assert run(engine, second) == run(setup.plain(), requests_for(follow_ups))
    assert second[0].num_cached_tokens == 40
    setup.check_drafts([*first, *second])


def test_correct_heads_are_accepted_to_the_last_one(tmp_path: Path) -> None:
    """Which also says that each head is asked about the token that it was made for."""
    setup = MedusaSetup(tmp_path, make_target=forgetful_target)
    tokens = orbit(setup.untouched, 17, 60)
    teach(setup.heads, setup.untouched, tokens)
    request = Request("0", [17], SamplingParams(max_tokens=41, temperature=0))
    assert run(engine_over(setup.runner, setup.recording), [request]) == [tokens[1:42]]
    assert setup.recording.accepted == [0, *[NUM_HEADS] * 10]


def test_the_state_is_that_of_the_last_accepted_node(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path, make_target=forgetful_target, change=bushy)
    tokens = orbit(setup.untouched, 17, 60)
    teach(setup.heads, setup.untouched, tokens)
    request = Request("0", [17], SamplingParams(max_tokens=32, temperature=0))
    run(engine_over(setup.runner, setup.recording), [request])
    assert setup.recording.accepted == [0, *[2] * 10, 0]


def test_few_slots_give_a_chain_if_heads_are_confident(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path, make_target=forgetful_target)
    tokens = orbit(setup.untouched, 17, 60)
    teach(setup.heads, setup.untouched, tokens)
    request = Request("0", [17], SamplingParams(max_tokens=5, temperature=0))
    run(engine_over(setup.runner, setup.recording), [request])
    # Room for max_tokens - 1 known outputs and the last one, which is sampled: three.
    assert setup.drafts["0", 2] == Draft(tuple(tokens[2:5]), confidences=setup.drafts["0", 2].confidences)


def test_guesses_that_were_right_come_first(tmp_path: Path) -> None:
    """Heads that are right with their second guess alone get it in front."""
    setup = MedusaSetup(tmp_path, make_target=forgetful_target)
    tokens = orbit(setup.untouched, 17, 100)
    teach(setup.heads, setup.untouched, tokens)
    never = min(set(range(VOCAB)) - set(tokens))
    with torch.inference_mode():
        for head in setup.heads.lm_heads:
            head.weight[never] = 1.05 * head.weight[list(set(tokens))].sum(dim=0)
    for name in ("first", "last"):
        request = Request(name, [17], SamplingParams(max_tokens=90, temperature=0))
        run(engine_over(setup.runner, setup.recording), [request])
    assert setup.drafts["first", 2].token_ids[0] == never
    assert setup.drafts["last", 2].token_ids[:3] == tuple(tokens[2:5])


def test_the_state_is_transferred(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path)
    engine = setup.plain()
    text = prompts(10)[0]
    source = Request("source", list(text), SamplingParams(max_tokens=2, temperature=0))
    engine.scheduler.blocks.grow(source, 10)
    batch = setup.runner.build_batch([ScheduledSequence(source, 10)])
    logits = setup.runner.forward(batch)
    results = {result.sequence.request.request_id: result for result in engine.verifier.verify(batch, logits)}
    setup.state.computed(batch, results)
    data = setup.state.export_state("source")

    moved = Request("moved", text, SamplingParams(max_tokens=12, temperature=0))
    moved.output_token_ids = list(results["source"].token_ids)
    moved.block_ids, moved.num_computed_tokens = source.block_ids, 10
    speculating = engine_over(setup.runner, setup.recording)
    speculating.scheduler.blocks.pool = engine.scheduler.blocks.pool
    setup.state.adopt(moved, data)
    run(speculating, [moved])
    assert ("moved", 11) in setup.drafts
    setup.check_drafts([moved])


def test_mismatching_states_are_not_used(tmp_path: Path) -> None:
    setup = MedusaSetup(tmp_path)
    request = Request("x", [1, 2], SamplingParams(max_tokens=9), output_token_ids=[3], num_computed_tokens=2)
    setup.state.adopt(request, None)
    assert setup.state.hidden(request) is None
    setup.state.adopt(request, bytes(4 * HIDDEN))
    assert setup.state.hidden(request) is not None
    request.append_output(4)  # by a step that the state has not seen
    assert setup.state.hidden(request) is None
    with pytest.raises(ValueError, match="12 bytes were received"):
        setup.state.adopt(request, bytes(12))
    with pytest.raises(ValueError, match="without this draft"):
        MedusaState(setup.heads, ModelRunner(prepare_model(tiny_target(), "float32"), 8, BLOCK_SIZE))


def test_the_best_choices_are_the_most_probable_paths() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4, 0.1]]
    everything = {
        path: math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))
        for length in (1, 2, 3)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:length]))
    }
    for num_nodes in range(len(everything) + 3):
        choices = best_choices(accuracies, num_nodes)
        best = sorted(everything.values(), reverse=True)[:num_nodes]
        assert [everything[path] for path in choices] == pytest.approx(best)
        assert all(path[:-1] in ((), *choices[:place]) for place, path in enumerate(choices)), "parents come first"
    assert best_choices([], 5) == []
    assert best_choices([[1.0, 0.0], [1.0]], 5) == [(0,), (0, 0)]
