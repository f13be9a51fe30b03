"""Shadow mode: drafts are judged by the tokens of plain decoding, and change none of them."""

from __future__ import annotations

import pytest

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import VerifyResult
from baton.engine.draft.loading import LoadedDraft
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.rpc.wire import worker_pb2
from cluster.config.worker_config import SpeculationConfig
from decode_worker.draft_reports import fill_speculation
from decode_worker.speculation.controller import RegisteredMethod, SpeculationController
from decode_worker.speculation.draft_figures import DraftFigures
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.registry import create_controller
from decode_worker.speculation.shadow import ShadowDrafts
from tests.drafting import BLOCK_SIZE, engine_over
from tests.engine_runs import build_runner, run_tokens
from tests.method_drafts import draft_for
from tests.tiny_drafts import VOCAB, tiny_target
from tests.tiny_models import tiny_model

CHAIN = Draft((1, 2, 3))
TREE = Draft((1, 2, 3, 4), (ROOT, ROOT, 1, 2))


def outcome(draft: Draft, *steps: tuple[int, ...], ends: bool = False) -> tuple[int, list[int], list[int]]:
    """(number of judged drafts, reached, accepted) when these tokens come, step by step."""
    shadow = ShadowDrafts("ngram", 1.0)
    shadow.keep(Request("one", [1], SamplingParams()), draft)
    for tokens in steps:
        shadow.observe("one", tokens)
    if ends:
        shadow.release("one")
    figures = shadow.figures
    return figures.num_drafts, figures.reached, figures.accepted


@pytest.mark.parametrize(
    ("draft", "steps", "expected"),
    [
        (CHAIN, [(1,), (2,), (3,)], (1, [1, 1, 1], [1, 1, 1])),
        (CHAIN, [(1, 2), (9,)], (1, [1, 1, 1], [1, 1, 0])),
        (CHAIN, [(9,), (2,), (3,)], (1, [1], [0])),
        (CHAIN, [(1,)], (0, [], [])),
        (TREE, [(2,), (3,), (4,)], (1, [1, 1, 1], [1, 1, 1])),
        (TREE, [(1,), (7,)], (1, [1], [1])),
        (TREE, [(2,), (8,)], (1, [1, 1], [1, 0])),
    ],
)
def test_drafts_are_compared_with_the_tokens_that_come(draft, steps, expected):
    assert outcome(draft, *steps) == expected


def test_a_request_that_ends_is_judged_by_what_it_got():
    assert outcome(CHAIN, (1,), ends=True) == (1, [1], [1])
    assert outcome(CHAIN, ends=True) == (0, [], [])


def test_a_share_of_the_steps_is_due():
    shadow = ShadowDrafts("ngram", 0.25)
    due = []
    for _ in range(9):
        due.append(shadow.is_due)
        shadow.begin() if shadow.is_due else shadow.skip()
    assert due == [False, False, False, True] * 2 + [False]


def shadowing(share: float = 1.0) -> SpeculationController:
    methods = {"ngram": RegisteredMethod(NgramProposer(), 8)}
    return SpeculationController(methods, "none", shadow=ShadowDrafts("ngram", share))


def repeating(method: str | None = None) -> Request:
    request = Request("one", [1, 2, 3, 4] * 8, SamplingParams(max_tokens=50), speculation_method=method)
    request.num_computed_tokens = len(request.prompt_token_ids) - 1
    return request


def test_nothing_is_proposed_and_everything_is_measured():
    controller, request = shadowing(), repeating()
    plan = [ScheduledSequence(request, 1)]
    assert controller.propose(plan, {"one": 8}) == {}
    for token in (1, 2, 9):
        controller.observe(VerifyResult(ScheduledSequence(request, 1), (), token))
    stats = worker_pb2.WorkerStats()
    fill_speculation(stats, controller, 0.0)
    [method] = [own for own in stats.methods if own.is_shadow]
    assert (method.method, list(method.reached), list(method.accepted)) == ("ngram", [1, 1, 1], [1, 1, 0])
    assert method.costs


def test_requests_that_name_a_method_are_not_shadowed():
    controller, request = shadowing(), repeating("ngram")
    assert controller.propose([ScheduledSequence(request, 1)], {"one": 8})["one"].method == "ngram"
    assert controller.shadow is not None
    assert not controller.shadow.is_followed("one")


def test_a_method_drafts_once_a_step():
    methods = {"ngram": RegisteredMethod(NgramProposer(), 8, is_automatic=True)}
    controller = SpeculationController(methods, "none", shadow=ShadowDrafts("ngram", 1.0))
    other = Request("two", [1, 2, 3, 4] * 8, SamplingParams(max_tokens=50))
    other.num_computed_tokens = len(other.prompt_token_ids) - 1
    plan = [ScheduledSequence(repeating("auto"), 1), ScheduledSequence(other, 1)]
    controller.propose(plan, {"one": 8, "two": 8})
    assert controller.shadow is not None
    assert not controller.shadow.is_followed("two")
    controller.propose(plan[1:], {"two": 8})
    assert controller.shadow.is_followed("two")


def test_steps_may_run_ahead_until_the_shadow_is_due():
    controller, plan = shadowing(0.25), [ScheduledSequence(repeating(), 1)]
    assert [controller.leaves_alone(plan) for _ in range(4)] == [True, True, True, False]


def test_tokens_are_those_of_plain_decoding():
    runner = build_runner(tiny_model("llama"), decoder="transformers")
    prompts = [[n + 1, 5, 6, 7] * 6 for n in range(3)]
    controller = shadowing()
    plain = run_tokens(engine_over(runner), prompts, 24)
    assert run_tokens(engine_over(runner, controller), prompts, 24) == plain
    assert controller.shadow is not None
    assert controller.shadow.figures.num_drafts > 0
    assert not any(own.num_drafts for own in controller.figures.by_method.values())


PROMPTS = [[n + 1, 5, 6, 7, 9] for n in range(3)]


def runner_of(target: LoadedModel, draft: LoadedDraft | None = None) -> ModelRunner:
    network = None if draft is None else draft.network
    return ModelRunner(target, 96, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=network)


def shadowed_tokens(
    target: LoadedModel, draft: LoadedDraft | None, shadow: str
) -> tuple[DraftFigures, list[list[int]]]:
    """What became of the drafts of ``shadow`` in each step, and the tokens of plain decoding beside it."""
    config = SpeculationConfig(method="none", shadow=shadow, shadow_share=1.0, max_draft_tokens=4)
    runner = runner_of(target, draft)
    controller = create_controller(config, runner, draft)
    tokens = run_tokens(engine_over(runner, controller), PROMPTS, 16)
    assert controller.shadow is not None
    return controller.shadow.figures, tokens


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "draft_model"])
def test_networks_draft_beside_plain_decoding(method, tmp_path):
    target = prepare_model(tiny_target(), "float32")
    drafts, plain = shadowed_tokens(target, draft_for(method, target, tmp_path), method)
    assert drafts.num_drafts > 0
    assert plain == run_tokens(engine_over(runner_of(target)), PROMPTS, 16)


def test_a_draft_model_that_is_the_target_is_always_right():
    target = prepare_model(tiny_target(), "float32")
    own = LoadedDraft("draft_model", "itself", DraftModel(prepare_model(tiny_target(), "float32"), VOCAB))
    drafts, _ = shadowed_tokens(target, own, "draft_model")
    assert drafts.reached[:4] == drafts.accepted[:4]
    assert drafts.reached[3] > 0


def test_a_shadow_that_needs_a_draft_is_refused_without_one():
    config = SpeculationConfig(method="none", draft="none", shadow="eagle3")
    with pytest.raises(ConfigError, match=r"speculation\.shadow is eagle3, but no draft is loaded"):
        create_controller(config, build_runner(tiny_model("llama"), decoder="transformers"), None)
