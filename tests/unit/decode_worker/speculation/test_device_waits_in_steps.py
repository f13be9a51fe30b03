"""How often the host waits for its device in an engine's step: once for the tokens, once a pass for a draft's guesses.

Everything lies on the meta device, where each number that the host reads is 1, so that all drafts are accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.core.request import Request, SamplingParams
from baton.engine.contracts import DraftNetwork
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.medusa.heads import load_medusa
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.draft.model.token_state import TokenState
from baton.engine.models.model_loader import LoadedModel
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.draft_model import DraftModelProposer
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.eagle.tree_drafter import TreeSettings
from decode_worker.speculation.lookahead import LookaheadProposer
from decode_worker.speculation.medusa import MedusaProposer
from decode_worker.speculation.method import DraftMethod
from prefill_worker.prompt_draft import PromptDraft
from tests.device_steps import on_device, prepared, without_kernels
from tests.device_waits import DeviceWaits, Kind
from tests.drafting import MAX_DRAFT_TOKENS, Unweighed, engine_over, prompts
from tests.tiny_drafts import (
    VOCAB,
    TinyDraft,
    tiny_draft_lm,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_speculators,
    tiny_target,
)

META = torch.device("meta")
BLOCK_SIZE = 4
NUM_SEQUENCES = 3
NUM_CHUNKS = 3
Build = Callable[[LoadedModel, Path], tuple[ModelRunner, DraftMethod | None]]

TOKENS = "baton/engine/sampling/sampler.py:read"
CHAIN = "decode_worker/speculation/chains.py:likeliest"
TREE = "decode_worker/speculation/eagle/tree_drafter.py:_expand"
MEDUSA = "decode_worker/speculation/medusa.py:propose"
LOOKAHEAD = "decode_worker/speculation/lookahead.py:computed"
DRAW = "decode_worker/speculation/acceptance_rules.py:draw_from"
JUDGE = "decode_worker/speculation/acceptance_rules.py:judge"
PROCESSED_PASS = "decode_worker/speculation/chains.py:_extend_processed"
DRAWN_PASS = {
    "decode_worker/speculation/acceptance_rules.py:draw_drafts": 1,  # which rows have any probability
    DRAW: 1,  # their tokens
    PROCESSED_PASS: 1,  # how certain they are
}
BONUS_TOKEN = {"decode_worker/speculation/acceptance_rules.py:draw_token": 1, DRAW: 1}
"""Of each sequence that a rule decides on, behind its last accepted token."""
RESIDUAL_NODE = {"decode_worker/speculation/acceptance_rules.py:_normalised": 1, JUDGE: 2}


def runner_for(loaded: LoadedModel, draft: DraftNetwork | None = None) -> ModelRunner:
    return ModelRunner(loaded, 96, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=draft)


def passes() -> DraftPasses:
    """Every pass pays."""
    return DraftPasses(StepCostModel())


def plain(loaded: LoadedModel, folder: Path) -> tuple[ModelRunner, None]:
    return runner_for(loaded), None


def eagle(make: Callable[[], TinyDraft], *, draws: bool = False, trees: bool = False) -> Build:
    def build(loaded: LoadedModel, folder: Path) -> tuple[ModelRunner, DraftMethod]:
        head = load_eagle(make().write(folder), loaded.model, torch.bfloat16, META)
        runner = runner_for(loaded, head)
        state = FeatureState(head, runner)
        return runner, EagleProposer(state, passes(), draws=draws, trees=TreeSettings() if trees else None)

    return build


def draft_model(*, draws: bool = False) -> Build:
    def build(loaded: LoadedModel, folder: Path) -> tuple[ModelRunner, DraftMethod]:
        draft = DraftModel(on_device(prepared(tiny_draft_lm(num_layers=1))), VOCAB)
        runner = runner_for(loaded, draft)
        return runner, DraftModelProposer(TokenState(draft, runner), passes(), draws=draws)

    return build


def medusa(loaded: LoadedModel, folder: Path) -> tuple[ModelRunner, DraftMethod]:
    heads = load_medusa(tiny_medusa_v1().write(folder), loaded.model, torch.bfloat16, META)
    runner = runner_for(loaded, heads)
    return runner, MedusaProposer(MedusaState(heads, runner), passes())


def lookahead(loaded: LoadedModel, folder: Path) -> tuple[ModelRunner, DraftMethod]:
    return runner_for(loaded), LookaheadProposer()


def each(count: int, waits: dict[str, int]) -> Counter[str]:
    """So many times those."""
    return Counter({place: count * number for place, number in waits.items()})


@pytest.fixture(scope="module", autouse=True)
def _no_kernels() -> Iterator[None]:
    with without_kernels():
        yield


def waits_of_a_step(
    build: Build, folder: Path, acceptance: str = "match", params: SamplingParams | None = None
) -> tuple[Counter[str], int]:
    """Of the first step behind the prompts, by place; and the tokens that the first sequence got."""
    waits = DeviceWaits()
    with waits:  # loading and prompts may wait
        runner, method = build(on_device(prepared(tiny_target(num_layers=6))), folder)
        engine = engine_over(runner, Unweighed(method) if method else None, acceptance=acceptance)
        for index, prompt in enumerate(prompts(9, 14, 6)[:NUM_SEQUENCES]):
            engine.scheduler.add(Request(str(index), prompt, params or SamplingParams(max_tokens=60, temperature=0)))
        assert len(engine.step()) == NUM_SEQUENCES
        waits.found.clear()
        outputs = engine.step()
    assert [output.error for output in outputs] == [None] * NUM_SEQUENCES
    return waits.places, len(outputs[0].token_ids)


SAMPLED = SamplingParams(max_tokens=60, temperature=0.7)
PROCESSED = SamplingParams(max_tokens=60, temperature=0.7, repetition_penalty=1.2, logit_bias=((5, 1.0),), min_tokens=9)
CHAINS = each(MAX_DRAFT_TOKENS, {CHAIN: 1})
PROCESSED_CHAINS = each(MAX_DRAFT_TOKENS, {PROCESSED_PASS: 1})
DRAWN = each(MAX_DRAFT_TOKENS, DRAWN_PASS)


@pytest.mark.parametrize(
    ("build", "params", "expected"),
    [
        pytest.param(plain, None, {}, id="no draft"),
        pytest.param(eagle(tiny_eagle), None, CHAINS, id="EAGLE-1"),
        pytest.param(eagle(tiny_eagle3), None, CHAINS, id="EAGLE-3"),
        pytest.param(eagle(tiny_eagle3), PROCESSED, PROCESSED_CHAINS, id="EAGLE-3, processed"),
        pytest.param(
            eagle(lambda: tiny_speculators(num_layers=2)),
            None,
            CHAINS,
            id="EAGLE-3 of two layers",
            marks=pytest.mark.thorough(covered_by="[EAGLE-3]"),
        ),
        pytest.param(eagle(tiny_eagle3, trees=True), None, {TREE: 2}, id="EAGLE-2 trees"),
        pytest.param(
            eagle(tiny_eagle3, trees=True),
            PROCESSED,
            {TREE: 2},
            id="EAGLE-2 trees, processed",
            marks=pytest.mark.thorough(covered_by="[EAGLE-2 trees]"),
        ),
        pytest.param(eagle(tiny_eagle3, draws=True), SAMPLED, DRAWN, id="EAGLE-3, drawn"),
        pytest.param(draft_model(), None, CHAINS, id="draft model"),
        pytest.param(
            draft_model(draws=True),
            SAMPLED,
            DRAWN,
            id="draft model, drawn",
            marks=pytest.mark.thorough(covered_by="[EAGLE-3, drawn]"),
        ),
        pytest.param(medusa, None, {MEDUSA: 1}, id="Medusa"),
        pytest.param(lookahead, None, {LOOKAHEAD: 1}, id="lookahead"),
    ],
)
def test_a_step_waits_for_its_tokens_and_once_per_pass(
    build: Build, params: SamplingParams | None, expected: Counter[str], tmp_path: Path
) -> None:
    places, num_tokens = waits_of_a_step(build, tmp_path, params=params)
    assert places == Counter(expected) + Counter({TOKENS: 1})
    assert num_tokens > 1 or build is plain or build is lookahead


def test_residual_acceptance_waits_for_each_node_and_each_bonus_token(tmp_path: Path) -> None:
    places, num_tokens = waits_of_a_step(eagle(tiny_eagle3, draws=True), tmp_path, "residual", SAMPLED)
    assert num_tokens == MAX_DRAFT_TOKENS + 1
    nodes = each(NUM_SEQUENCES * MAX_DRAFT_TOKENS, RESIDUAL_NODE)
    assert places == DRAWN + nodes + each(NUM_SEQUENCES, BONUS_TOKEN) + Counter({TOKENS: 1})


def test_typical_acceptance_waits_for_each_draft_and_each_bonus_token(tmp_path: Path) -> None:
    places, num_tokens = waits_of_a_step(medusa, tmp_path, "typical", SAMPLED)
    assert num_tokens > 1
    assert places == each(NUM_SEQUENCES, {JUDGE: 1, **BONUS_TOKEN}) + Counter({MEDUSA: 1, TOKENS: 1})


@pytest.mark.parametrize(
    "acceptance", ["residual", pytest.param("typical", marks=pytest.mark.thorough(covered_by="[residual]"))]
)
def test_no_rule_decides_for_greedy_requests(acceptance: str, tmp_path: Path) -> None:
    places, _ = waits_of_a_step(eagle(tiny_eagle3), tmp_path, acceptance)
    assert places == CHAINS + Counter({TOKENS: 1})


@pytest.mark.parametrize(
    "build",
    [
        eagle(tiny_eagle3),
        pytest.param(eagle(lambda: tiny_speculators(num_layers=2)), marks=pytest.mark.thorough(covered_by="[EAGLE-3]")),
        medusa,
    ],
    ids=["EAGLE-3", "EAGLE-3 of two layers", "Medusa"],
)
def test_prompts_and_their_handoff_wait_only_for_sent_data(build: Build, tmp_path: Path) -> None:
    waits = DeviceWaits()
    with waits:
        runner, method = build(on_device(prepared(tiny_target(num_layers=6))), tmp_path)
        state = vars(method)["_state"]
        engine = engine_over(runner, PromptDraft(state), chunk_tokens=8)
        request = Request("0", prompts(21)[0], SAMPLED)
        engine.scheduler.add(request)
        waits.found.clear()
        for _ in range(NUM_CHUNKS):
            engine.step()
        assert len(request.output_token_ids) == 1
        assert waits.places == {TOKENS: NUM_CHUNKS}
        waits.found.clear()
        sent = state.export_state("0")
        assert [wait.kind for wait in waits.waits] == [Kind.DOWNLOAD]
        waits.found.clear()
        state.release("0")
        state.adopt(request, sent)
        assert waits.waits == []
