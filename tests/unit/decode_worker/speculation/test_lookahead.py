"""Lookahead: windows move as Jacobi iteration says, pools stay within bounds, and no token of the target changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Proposer, VerifyResult
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from decode_worker.speculation.lookahead import (
    JacobiWindow,
    LookaheadProposer,
    LookaheadSettings,
    NgramPool,
    Source,
    merge_paths,
)
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import Eager, Unweighed, registered
from tests.engine_runs import BLOCK_SIZE, build_runner
from tests.tiny_models import tiny_model
from tests.toy_language import Table, batch_of, known_tokens, logits_of

SETTINGS = LookaheadSettings()
JACOBI_ONLY = LookaheadSettings(learns_from_text=False)


class Windows(LookaheadProposer):
    """Notes for each draft what its window was, and for each step what it became."""

    def __init__(self, own: LookaheadSettings) -> None:
        super().__init__(own)
        self.before: list[tuple[list[int], list[tuple[int, ...]]]] = []
        self.after: list[list[int]] = []
        self.largest_pool = 0

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        moving = []
        for sequence in batch.sequences:
            state = self._states.get(sequence.request.request_id)
            if state is not None and state.num_columns:
                self.before.append((known_tokens(sequence.request), state.window.paths(state.num_columns)))
                moving.append(state)
        super().computed(batch, logits, results)
        self.after += [[column[-1] for column in state.window.columns] for state in moving]
        self.largest_pool = max(self.largest_pool, *(len(state.pool) for state in self._states.values()), 0)


def poison(runner: ModelRunner) -> None:
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)


def generate(
    runner: ModelRunner,
    method: DraftMethod | Proposer | None,
    *,
    temperature: float = 0.0,
    chunk_tokens: int = 64,
    num_blocks: int | None = None,
    max_draft_tokens: int = 24,
    methods: Sequence[str | None] = (None,),
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> tuple[list[list[int]], int, Engine]:
    """Eight requests at once: their tokens, and how many drafts were accepted."""
    proposer = None if method is None else Unweighed(method)
    poison(runner)
    chance = random.Random(3)
    blocks = BlockManager(num_blocks or runner.cache.num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerLimits(chunk_tokens, 16, 128), blocks)
    engine = Engine(runner, scheduler, SampleAndMatch(), proposer, max_draft_tokens=max_draft_tokens)
    requests = []
    for index in range(8):
        prompt = [chance.randrange(3, 9) for _ in range(chance.randrange(1, 30))]
        params = SamplingParams(
            max_tokens=30, temperature=temperature, seed=index, top_k=6, presence_penalty=0.1, logit_bias=logit_bias
        )
        method = methods[index % len(methods)]
        requests.append(Request(str(index), prompt, params, arrival_s=index, speculation_method=method))
        scheduler.add(requests[-1])
    accepted = 0
    while scheduler.has_work():
        accepted += sum(output.num_accepted for output in engine.step())
    assert blocks.check([]) == []
    return [request.output_token_ids for request in requests], accepted, engine


FEW_TOKENS = ((3, 60.0), (4, 60.0))  # sampled guesses are often right


@pytest.mark.parametrize("own", [SETTINGS, JACOBI_ONLY, LookaheadSettings(3, 2, 2), LookaheadSettings(window=0)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_match_plain_decoding(runner: ModelRunner, temperature: float, own: LookaheadSettings) -> None:
    bias = FEW_TOKENS if temperature else ()
    plain, _, _ = generate(runner, None, temperature=temperature, logit_bias=bias)
    proposer = LookaheadProposer(own)
    tokens, accepted, _ = generate(runner, proposer, temperature=temperature, logit_bias=bias)
    assert tokens == plain
    assert accepted > (0 if temperature and not own.learns_from_text else 10)
    assert not proposer._states, "requests that ended are forgotten"


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_tokens_match_plain_decoding_for_other_models(name: str) -> None:
    runner = build_runner(tiny_model(name), num_blocks=256)
    plain, _, _ = generate(runner, None)
    tokens, accepted, _ = generate(runner, LookaheadProposer())
    assert tokens == plain
    assert accepted > 10


@pytest.mark.parametrize("max_draft_tokens", [1, 2, 3, 5, 8])
def test_tokens_match_plain_decoding_with_few_slots(runner: ModelRunner, max_draft_tokens: int) -> None:
    plain, _, _ = generate(runner, None)
    tokens, accepted, _ = generate(runner, LookaheadProposer(), max_draft_tokens=max_draft_tokens)
    assert tokens == plain
    assert accepted > 0


def test_preemption_and_chunking_change_nothing(runner: ModelRunner) -> None:
    plain, _, _ = generate(runner, None)
    tokens, accepted, engine = generate(runner, LookaheadProposer(), chunk_tokens=17, num_blocks=30)
    assert tokens == plain
    assert accepted > 0
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("is_automatic", [False, True], ids=["by name", "automatic"])
def test_tokens_match_beside_requests_that_forbid_speculation(runner: ModelRunner, *, is_automatic: bool) -> None:
    """By name a draft is verified as it is; an automatic one may be cut anywhere."""
    wanted = "auto" if is_automatic else "lookahead"
    plain, _, _ = generate(runner, None, logit_bias=FEW_TOKENS)
    controller = Eager(registered({"lookahead": LookaheadProposer()}, 24, is_automatic=is_automatic), "none")
    tokens, accepted, _ = generate(runner, controller, methods=(wanted, "none", None), logit_bias=FEW_TOKENS)
    assert tokens == plain
    assert accepted > 0
    assert controller.num_failures == 0


@torch.inference_mode()
def likeliest(model: PreTrainedModel, token_ids: Sequence[int]) -> int:
    return int(model(input_ids=torch.tensor([list(token_ids)])).logits[0, -1].argmax())


def test_windows_follow_jacobi_iteration() -> None:
    """The last level is what the untouched model says behind the known tokens and each column's own path."""
    untouched = tiny_model("llama")
    proposer = Windows(JACOBI_ONLY)
    generate(build_runner(tiny_model("llama"), num_blocks=256), proposer, max_draft_tokens=12)
    assert len(proposer.before) > 30
    for (known, paths), found in list(zip(proposer.before, proposer.after, strict=True))[::7]:
        assert found == [likeliest(untouched, [*known, *path]) for path in paths]
    assert any(len(paths) > 2 for _, paths in proposer.before)
    assert proposer.largest_pool > 5


class Walk:
    """A request that goes on without an engine: the toy language says what the target makes of every draft."""

    def __init__(self, proposer: LookaheadProposer, table: Table, prompt: Sequence[int]) -> None:
        self.proposer = proposer
        self.table = table
        self.request = Request("toy", list(prompt), SamplingParams(max_tokens=500, temperature=0))

    def step(self, room: int, keep: Callable[[Draft], Draft] = lambda draft: draft) -> tuple[Draft, VerifyResult]:
        self.request.num_computed_tokens = self.request.num_tokens - 1
        plain = ScheduledSequence(self.request, 1)
        draft = keep(self.proposer.propose([plain], {"toy": room}).get("toy", Draft()))
        sequence = ScheduledSequence(self.request, 1, draft)
        batch, logits = batch_of([sequence]), logits_of(self.table, sequence)
        [result] = SampleAndMatch().verify(batch, logits)
        self.proposer.computed(batch, logits, {"toy": result})
        self.proposer.observe(result)
        for token in result.token_ids:
            self.request.append_output(token)
        return draft, result


@settings(max_examples=30, deadline=None)
@given(
    own=st.builds(
        LookaheadSettings, window=st.integers(0, 6), ngram=st.integers(2, 5), guesses=st.integers(1, 5),
        learns_from_text=st.booleans(),
    ),
    rooms=st.lists(st.integers(0, 40), min_size=1, max_size=15),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12),
)  # fmt: skip
def test_drafts_are_trees_within_their_slots(
    own: LookaheadSettings, rooms: list[int], cuts: list[int], prompt: list[int]
) -> None:
    walk = Walk(LookaheadProposer(own), Table(5, seed=1), prompt)
    for step, room in enumerate(rooms):
        draft, _ = walk.step(room, lambda draft, step=step: draft.first(cuts[step % len(cuts)]))  # type: ignore[misc]
        assert len(draft) <= room
        branches = [(draft.parent(node), token) for node, token in enumerate(draft.token_ids)]
        assert len(set(branches)) == len(branches)
        assert all(ROOT <= parent < node for node, (parent, _) in enumerate(branches))
        assert all(0 <= confidence <= 1 for confidence in draft.confidences)
        assert len(draft.confidences) == len(draft)


@settings(max_examples=60, deadline=None)
@given(
    per_token=st.integers(1, 4),
    capacity=st.integers(1, 12),
    ngrams=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)), max_size=60),
)
def test_pools_keep_the_newest_ngrams_within_bounds(
    per_token: int, capacity: int, ngrams: list[tuple[int, int, int]]
) -> None:
    pool = NgramPool(per_token, capacity)
    for count, ngram in enumerate(ngrams, start=1):
        pool.add(ngram, "text")
        kept = {first: [guess.token_ids for guess in pool.following(first)] for first in range(6)}
        assert sum(map(len, kept.values())) == len(pool) <= capacity
        assert all(len(own) <= per_token for own in kept.values())
        assert kept[ngram[0]][0] == ngram[1:]
        for first, own in kept.items():
            newest = list(dict.fromkeys(rest for start, *rest_ in reversed(ngrams[:count])
                                        if start == first for rest in [tuple(rest_)]))  # fmt: skip
            assert own == newest[: len(own)]


def test_the_least_recently_used_ngrams_are_evicted_first() -> None:
    pool = NgramPool(2, capacity=3)
    source: Source = "found"
    for ngram in ((1, 10), (2, 20), (3, 30)):
        pool.add(ngram, source)
    pool.following(1)
    pool.add((4, 40), source)
    assert [bool(pool.following(token)) for token in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_window_is_level_zero_followed_by_its_own_column() -> None:
    request = Request("a", [7, 8, 9], SamplingParams())
    window = JacobiWindow(3, position=2, columns=[[0, 10, 20], [1, 11, 21], [2, 12, 22]])
    window.place(request, 3, random.Random(0))
    assert window.paths(3) == [(10, 20), (1, 11, 21), (1, 2, 12, 22)]
    assert window.advance([30, 31]) == [(9, 10, 20, 30), (1, 11, 21, 31)]
    request.output_token_ids += [50, 51]  # one draft was accepted, so that the window skips one position
    window.place(request, 2, random.Random(0))
    assert window.position == 4
    assert window.columns[0] == [51, 21, 31]
    assert len(window.columns) == 2
    assert set(window.columns[1]) <= {7, 8, 9, 50, 51}


@pytest.mark.parametrize(
    ("room", "num_guesses", "expected"),
    [(29, 5, (5, 5)), (29, 0, (0, 5)), (14, 5, (2, 3)), (14, 0, (0, 5)), (8, 5, (1, 2)), (3, 5, (1, 0)), (3, 0, (0, 1)),
     (1, 0, (0, 0)), (1, 2, (1, 0)), (100, 9, (5, 5))],
)  # fmt: skip
def test_slots_are_shared_between_sequences(room: int, num_guesses: int, expected: tuple[int, int]) -> None:
    assert SETTINGS.shares(room, num_guesses) == expected


@pytest.mark.parametrize("wrong", [{"window": -1}, {"ngram": 1}, {"guesses": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be at least"):
        LookaheadSettings(**wrong)


def test_the_end_of_a_long_prompt_is_learned() -> None:
    prompt = list(range(10_000))
    proposer = LookaheadProposer()
    request = Request("a", [*prompt, 9_000], SamplingParams())
    request.num_computed_tokens = request.num_tokens - 1
    draft = proposer.propose([ScheduledSequence(request, 1)], {"a": 6})["a"]
    assert draft.token_ids[:3] == (9_001, 9_002, 9_003)
    assert len(proposer._states["a"].pool) <= 4096


def test_accepted_drafts_raise_confidence() -> None:
    """A language that repeats itself: the n-grams of its text are soon trusted."""
    proposer = LookaheadProposer(LookaheadSettings(window=2, ngram=3, guesses=1))
    request = Request("a", [1, 2, 3] * 6, SamplingParams(max_tokens=200, temperature=0))
    following = {1: 2, 2: 3, 3: 1}
    first: float | None = None
    for _ in range(12):
        request.num_computed_tokens = request.num_tokens - 1
        draft = proposer.propose([ScheduledSequence(request, 1)], {"a": 8})["a"]
        first = draft.confidences[0] if first is None else first
        sequence = ScheduledSequence(request, 1, draft)
        tokens = [request.token_at(request.num_tokens - 1), *draft.token_ids]
        logits = torch.eye(4)[[following[token] for token in tokens]]
        [result] = SampleAndMatch().verify(batch_of([sequence]), logits)
        proposer.computed(batch_of([sequence]), logits, {"a": result})
        proposer.observe(result)
        for token in result.token_ids:
            request.append_output(token)
        assert len(result.accepted) >= 2
    assert first is not None
    assert draft.confidences[0] > first


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[index] for index in draft.path(node)) for node in range(len(draft))]


def assert_is_tree(draft: Draft) -> None:
    assert len(draft.parents) in (0, len(draft))
    assert all(ROOT <= draft.parent(node) < node for node in range(len(draft)))
    # Equal paths would be equal siblings somewhere.
    assert len(set(paths_of(draft))) == len(draft)
    assert all(0 <= confidence <= 1 for confidence in draft.confidences)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8))
def test_merged_paths_are_complete_and_contain_nothing_else(paths: list[list[int]]) -> None:
    draft, places = merge_paths(paths)
    assert_is_tree(draft)
    for path, nodes in zip(paths, places, strict=True):
        assert [draft.token_ids[node] for node in nodes] == path
        assert list(draft.path(nodes[-1])) == nodes
    assert {node for nodes in places for node in nodes} == set(range(len(draft)))
    assert paths_of(draft)[: len(paths[0])] == [tuple(paths[0][: end + 1]) for end in range(len(paths[0]))]
    assert merge_paths([path for path in paths for _ in range(2)])[0] == draft


def test_merged_paths_keep_the_highest_probability() -> None:
    draft, places = merge_paths([[1, 2], [1, 3], [4]], [[0.2, 0.5], [0.6, 0.25], [0.3]])
    assert draft == Draft((1, 2, 3, 4), (ROOT, 0, 0, ROOT), draft.confidences)
    assert places == [[0, 1], [0, 2], [3]]
    assert draft.confidences == pytest.approx((0.6, 0.5, 0.5, 0.75))
    assert merge_paths([]) == (Draft(), [])
    assert merge_paths([[5, 6], [5]], [[0.5, 0.4], [0.1]])[0] == Draft((5, 6), (), (0.5, 0.4))
