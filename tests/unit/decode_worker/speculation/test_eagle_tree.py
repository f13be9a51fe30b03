"""EAGLE-2 trees: what they hold is what the head says without any cache, and no token of the target changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import Proposer, VerifyResult
from baton.engine.draft.eagle.feature_state import FeatureState, WaitingRows
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.chains import ChainDrafter
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.eagle.tree_drafter import TreeDrafter, TreeSettings
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.tree import reach_probabilities
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import BLOCK_SIZE, Eager, EagleSetup, Unweighed, registered
from tests.tiny_drafts import TinyDraft, tiny_eagle, tiny_eagle3, tiny_speculators

NUM_BLOCKS = 96
WIDE = TreeSettings(top_k=3, max_depth=4, max_nodes=12, max_batch=8)
DRAFTS: dict[str, Callable[[], TinyDraft]] = {
    "eagle": tiny_eagle,
    "eagle3": tiny_eagle3,
    "eagle3.1": lambda: tiny_eagle3(fc_norm=True, norm_output=True),
    "two layers": lambda: tiny_speculators(num_layers=2),
}
ParamsOf = Callable[[int], SamplingParams]


def plain_or_sampled(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=20, temperature=0.7 * (index % 2), seed=index)


class Spy(EagleProposer):
    """Notes every tree that it drafts: request id, known tokens, room and draft."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trees: list[tuple[str, int, int, Draft]] = []
        self.num_accepted = 0

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        drafts = super().propose(plan, room)
        for sequence in plan:
            request = sequence.request
            if isinstance(self._drafter, TreeDrafter) and request.request_id in drafts:
                draft = drafts[request.request_id]
                self.trees.append((request.request_id, request.num_tokens, room[request.request_id], draft))
        return drafts

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)
        self.num_accepted += len(result.accepted)


class TreeSetup(EagleSetup):
    """An EAGLE head that drafts trees."""

    def __init__(self, folder: Path, make: Callable[[], TinyDraft] = tiny_eagle3, own: TreeSettings = WIDE) -> None:
        self.settings = own
        self._features: dict[tuple[int, ...], torch.Tensor] = {}
        super().__init__(make, folder)

    def make_method(self) -> Spy:
        self.passes = DraftPasses(StepCostModel())
        self.proposer = Spy(FeatureState(self.head, self.runner, weights="native"), self.passes, trees=self.settings)
        return self.proposer

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        method: DraftMethod | Proposer | None,
        params: ParamsOf = plain_or_sampled,
        *,
        chunk_tokens: int = 64,
        num_blocks: int = NUM_BLOCKS,
        max_draft_tokens: int = 9,
        methods: Sequence[str | None] = (None,),
        cached: BlockManager | None = None,
    ) -> tuple[list[list[int]], Engine]:
        proposer = None if method is None else Unweighed(method)
        blocks = cached or BlockManager(num_blocks, BLOCK_SIZE)
        for tensor in () if cached else (*self.runner.cache.keys, *self.runner.cache.values):
            tensor.fill_(torch.nan)
        scheduler = Scheduler(SchedulerLimits(chunk_tokens, 8, 120), blocks)
        engine = Engine(self.runner, scheduler, SampleAndMatch(), proposer, max_draft_tokens=max_draft_tokens)
        requests = []
        for index, prompt in enumerate(prompts):
            method = methods[index % len(methods)]
            request = Request(str(index), list(prompt), params(index), arrival_s=index, speculation_method=method)
            requests.append(request)
            scheduler.add(request)
        while scheduler.has_work():
            engine.step()
        assert blocks.check([]) == []
        return [request.output_token_ids for request in requests], engine

    @torch.inference_mode()
    def log_probs(self, known: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """The head's, over its own vocabulary, behind known tokens and guesses; all rows anew and without a cache."""
        if tuple(known) not in self._features:
            self._features[tuple(known)] = self.fused_states(known[:-1])
        hidden = self._features[tuple(known)]
        tokens = list(known[1:])
        fed, normed = self.head(torch.tensor(tokens), hidden, torch.arange(len(tokens)))
        for token in path:
            tokens.append(token)
            hidden = torch.cat((hidden, fed[-1:]))
            fed, normed = self.head(torch.tensor(tokens), hidden, torch.arange(len(tokens)))
        return torch.log_softmax(self.head.logits(normed[-1]), dim=-1)

    def reference_tree(self, known: Sequence[int], room: int) -> set[tuple[int, ...]]:
        """The paths of the tree that should be drafted."""
        top_k, deepest = self.settings.top_k, self.settings.max_depth
        room = min(room, self.settings.max_nodes)
        slots = room + 1
        scores: dict[tuple[int, ...], float] = {}
        beam: list[tuple[int, ...]] = [()]
        for depth in range(1, deepest + 1):
            level: dict[tuple[int, ...], float] = {}
            for path in beam:
                best = self.log_probs(known, path).topk(top_k)
                tokens = self.head.to_target_ids(best.indices).tolist()
                for token, value in zip(tokens, best.values.tolist(), strict=True):
                    level[*path, token] = scores.get(path, 0.0) + value
            scores |= level
            if depth == deepest:
                break
            width = min(top_k, math.ceil(slots / (deepest - depth)))
            worst = sorted(scores.values(), reverse=True)[room - 1] if len(scores) >= room else -math.inf
            beam = [path for path in sorted(level, key=lambda p: -level[p])[:width] if level[path] > worst]
            slots -= len(beam)
        return set(sorted(scores, key=lambda path: -scores[path])[:room])


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[index] for index in draft.path(node)) for node in range(len(draft))]


@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("name", DRAFTS)
def test_trees_match_the_head_and_tokens_match_the_target(name: str, chunk_tokens: int, tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path, DRAFTS[name])
    texts = prompts(3, 9, 14, 6)
    plain, _ = setup.run(texts, None)
    tokens, _ = setup.run(texts, setup.proposer, chunk_tokens=chunk_tokens)
    assert tokens == plain

    trees = setup.proposer.trees
    assert len(trees) > 40
    for name_of, num_tokens, room, draft in trees[::4]:
        known = (texts[int(name_of)] + plain[int(name_of)])[:num_tokens]
        paths = paths_of(draft)
        assert len(set(paths)) == len(paths) <= room
        assert set(paths) == setup.reference_tree(known, room), f"request {name_of} at {num_tokens}"
    assert any(not draft.is_chain for *_, draft in trees)


@pytest.mark.parametrize("max_draft_tokens", [1, 2, 4, 14])
def test_trees_stay_within_their_slots(max_draft_tokens: int, tmp_path: Path) -> None:
    """Slots behind the room are not the request's: a row there would spoil somebody else's cache."""
    setup = TreeSetup(tmp_path)
    texts = prompts(3, 9, 14, 6)
    plain, _ = setup.run(texts, None)
    tokens, _ = setup.run(texts, setup.proposer, max_draft_tokens=max_draft_tokens, chunk_tokens=60)
    assert tokens == plain
    assert {len(draft) for *_, draft in setup.proposer.trees} >= {min(max_draft_tokens, WIDE.max_nodes)}
    for name_of, num_tokens, room, draft in setup.proposer.trees[::6]:
        known = (texts[int(name_of)] + plain[int(name_of)])[:num_tokens]
        assert set(paths_of(draft)) == setup.reference_tree(known, room)


def test_likely_nodes_come_first(tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path)
    setup.run(prompts(3, 9, 14, 6), setup.proposer)
    for *_, draft in setup.proposer.trees:
        reach = reach_probabilities(draft)
        assert all(0 <= confidence <= 1 for confidence in draft.confidences)
        assert all(left >= right - 1e-9 for left, right in itertools.pairwise(reach))


def test_trees_and_tokens_match_under_preemption(tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path)
    texts = prompts(9, 14, 6, 12)
    plain, _ = setup.run(texts, None)
    tokens, engine = setup.run(texts, setup.proposer, num_blocks=20)
    assert tokens == plain
    assert engine.scheduler.num_preemptions > 0
    assert setup.proposer.trees
    for name_of, num_tokens, room, draft in setup.proposer.trees[::5]:
        known = (texts[int(name_of)] + plain[int(name_of)])[:num_tokens]
        assert set(paths_of(draft)) == setup.reference_tree(known, room)


def narrow(index: int) -> SamplingParams:
    """Few tokens to choose from, so that guesses are often right."""
    bias = ((3, 60.0), (4, 60.0), (5, 60.0))
    return SamplingParams(
        max_tokens=24, temperature=0.8 * (index % 2), seed=index, presence_penalty=0.2, logit_bias=bias, min_tokens=3
    )


def test_penalties_and_biases_apply_to_drafts(tmp_path: Path) -> None:
    """The head's own favourites would all be wrong here."""
    setup = TreeSetup(tmp_path, tiny_eagle)
    texts = prompts(5, 9, 7)
    plain, _ = setup.run(texts, None, narrow)
    tokens, _ = setup.run(texts, setup.proposer, narrow)
    assert tokens == plain
    assert setup.proposer.num_accepted > 30


def test_trees_and_tokens_match_beside_requests_that_forbid_speculation(tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path, tiny_eagle)
    texts = prompts(9, 14, 6, 12, 3)
    plain, _ = setup.run(texts, None, narrow)
    controller = Eager(registered({"trees": setup.proposer}, 9), "none")
    tokens, _ = setup.run(texts, controller, narrow, methods=("trees", "none", "auto"))
    assert tokens == plain
    assert controller.num_failures == 0
    assert {name for name, *_ in setup.proposer.trees} == {"0", "2", "3"}


def test_large_batches_get_chains(tmp_path: Path) -> None:
    """Trees, while few are left; both over one state."""
    setup = TreeSetup(tmp_path, own=TreeSettings(top_k=3, max_depth=4, max_nodes=12, max_batch=2))
    texts = prompts(9, 14, 6, 12)
    lengths = (8, 12, 24, 30)

    def params(index: int) -> SamplingParams:
        return SamplingParams(max_tokens=lengths[index], temperature=0.7 * (index % 2), seed=index)

    plain, _ = setup.run(texts, None, params)
    assert setup.run(texts, setup.proposer, params)[0] == plain
    assert {name for name, *_ in setup.proposer.trees} == {"2", "3"}
    for name_of, num_tokens, room, draft in setup.proposer.trees[::4]:
        known = (texts[int(name_of)] + plain[int(name_of)])[:num_tokens]
        assert set(paths_of(draft)) == setup.reference_tree(known, room)


def test_the_drafted_requests_are_those_of_the_outlook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests a few may be chosen; their chains teach what the next outlook on as many is made of."""
    setup = TreeSetup(tmp_path, own=TreeSettings(top_k=3, max_depth=4, max_nodes=12, max_batch=2))
    requests = [Request(str(index), [1, 2, 3], SamplingParams()) for index in range(3)]
    room = {request.request_id: 12 for request in requests}
    plan = [ScheduledSequence(requests[0], 1)]
    asked: list[str] = []

    def ask(what: str) -> dict[str, Draft]:
        asked.append(what)
        return {}

    monkeypatch.setattr(setup.proposer, "_rows_at_hand", lambda sequence: WaitingRows(sequence.request, 0, [], [3], 0))
    monkeypatch.setattr(ChainDrafter, "draft", lambda _, chains, network: ask(f"chain of {chains[0].room}"))
    monkeypatch.setattr(TreeDrafter, "draft", lambda _, waiting, room: ask(f"tree of {room['0']}"))
    for outlook_for in (requests, requests[:1], None):
        if outlook_for is not None:
            setup.proposer.outlook(outlook_for, room)
        setup.proposer.propose(plan, {"0": 12})
    assert asked == ["chain of 8", "tree of 12", "tree of 12"]


def test_trees_and_tokens_match_after_a_prefix_without_draft_kv(tmp_path: Path) -> None:
    """Its draft KV is not there, so that nothing may attend to it."""
    setup = TreeSetup(tmp_path)
    texts = prompts(17, 22)
    _, engine = setup.run(texts, None)
    longer = [[*text, 7, 8, 9] for text in texts]
    again, _ = setup.run(longer, setup.proposer, cached=engine.scheduler.blocks)
    assert again == setup.run(longer, None)[0]
    assert len(setup.proposer.trees) > 20
    # Numbers at every depth, though the prefix has none.
    assert all(max(map(len, paths_of(draft))) > 1 for *_, room, draft in setup.proposer.trees if room > 5)


def test_unprofitable_passes_are_not_run(tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path)
    plain, _ = setup.run(prompts(9, 4), None)
    setup.passes.rate = 1e9
    assert setup.run(prompts(9, 4), setup.proposer)[0] == plain
    assert {max(map(len, paths_of(draft))) for *_, draft in setup.proposer.trees} == {1}


def test_a_broken_head_drafts_nothing(tmp_path: Path) -> None:
    setup = TreeSetup(tmp_path)
    plain, _ = setup.run(prompts(9, 4), None)
    next(setup.head.parameters()).data.fill_(torch.nan)
    assert setup.run(prompts(9, 4), setup.proposer)[0] == plain
    assert not setup.proposer.trees


@pytest.mark.parametrize("name", ["top_k", "max_depth", "max_nodes", "max_batch"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        TreeSettings(**{name: 0})
