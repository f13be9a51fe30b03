"""The controller of speculation methods, and the names that may be asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import pytest
import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.core.roles import SpeculationMethod
from baton.core.step_costs import StepSample
from baton.engine.contracts import VerifyResult
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.rpc.wire import worker_pb2
from cluster.config.worker_config import SpeculationConfig
from decode_worker.draft_reports import fill_speculation
from decode_worker.speculation.controller import RegisteredMethod, SpeculationController
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.method import DraftMethod, Outlook
from decode_worker.speculation.registry import METHODS, assemble_speculation, create_controller, method_names
from tests.engine_runs import build_runner
from tests.tiny_models import tiny_model


def scheduled(name: str, method: str | None = None) -> ScheduledSequence:
    request = Request(name, [1, 2, 3], SamplingParams(max_tokens=50), speculation_method=method)
    request.num_computed_tokens = 2
    return ScheduledSequence(request, 1)


class Drafter:
    """Always the same draft."""

    def __init__(self, confidences: Sequence[float], token: int = 9, *, error: Exception | None = None) -> None:
        self.confidences = tuple(confidences)
        self.token = token
        self.error = error
        self.probs: torch.Tensor | None = None
        self.observed: list[VerifyResult] = []

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        if self.error is not None:
            raise self.error
        draft = Draft((self.token,) * len(self.confidences), confidences=self.confidences, probs=self.probs)
        return {s.request.request_id: draft for s in plan if s.request.request_id in room}

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        return None

    def observe(self, result: VerifyResult) -> None:
        self.observed.append(result)

    def release(self, request_id: str) -> None: ...


class Network(Drafter):
    """One whose drafts take passes, and whose state is told how much to keep."""

    def __init__(self, confidences: Sequence[float]) -> None:
        super().__init__(confidences, token=7)
        self.kept: list[int | None] = []

    def entry(self, passes: DraftPasses) -> RegisteredMethod:
        return RegisteredMethod(self, 4, is_automatic=True, passes=passes, state=self)

    def computed(self, *_: object) -> None: ...

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        return Outlook({request.request_id: self.confidences for request in requests})

    def keep(self, num_rows: int | None) -> None:
        self.kept.append(num_rows)

    def flush(self, request_id: str) -> None: ...

    def export_state(self, request_id: str) -> bytes:
        return b""

    def adopt(self, request: Request, state: bytes | None, first_new: int = 0) -> None: ...


def entries(
    methods: Mapping[str, DraftMethod], automatic: Collection[str] | None = None
) -> dict[str, RegisteredMethod]:
    """All of them automatic unless some are named."""
    return {
        name: RegisteredMethod(own, 4, is_automatic=automatic is None or name in automatic)
        for name, own in methods.items()
    }


class TestController:
    def test_a_request_can_choose_or_forbid_a_method(self) -> None:
        one, two = Drafter([0.9], token=1), Drafter([0.8], token=2)
        controller = SpeculationController(entries({"one": one, "two": two}, ["one"]), "auto")
        plan = [scheduled("a"), scheduled("b", "two"), scheduled("c", "none")]
        proposals = controller.propose(plan, dict.fromkeys("abc", 8))
        assert {name: proposal.token_ids for name, proposal in proposals.items()} == {"a": (1,), "b": (2,)}

    def test_steps_run_ahead_of_their_tokens_without_drafts(self) -> None:
        methods, cost = entries({"one": Drafter([0.9])}), StepCostModel()
        controller = SpeculationController(methods, "none")
        assert controller.leaves_alone([scheduled("a"), scheduled("b", "none")])
        assert not controller.leaves_alone([scheduled("a"), scheduled("b", "one")])
        assert not controller.leaves_alone([scheduled("a"), scheduled("b", "auto")])
        assert not SpeculationController(methods, "auto").leaves_alone([scheduled("a")])
        follows = {"network": Network([0.9]).entry(DraftPasses(cost))}
        assert not SpeculationController(follows, "none", cost).leaves_alone([scheduled("a")])

    def test_a_method_requested_by_name_drafts_even_if_nothing_pays(self) -> None:
        drafter = Drafter([0.001])
        controller = SpeculationController(entries({"one": drafter}), "auto")
        controller.costs.measured(StepSample(10.0, 0, 0, 8, 8, 0, 0, 0))
        plan = [scheduled(str(name)) for name in range(8)]
        room = dict.fromkeys((sequence.request.request_id for sequence in plan), 8)
        num_asked = 0
        for _ in range(40):
            controller.propose(plan, room)
            num_asked += controller.num_drafted // 8
            controller.num_drafted = 0
        assert 16 <= num_asked <= 30
        plan.append(scheduled("named", "one"))
        room["named"] = 8
        assert all("named" in controller.propose(plan, room) for _ in range(10))

    def test_an_idle_network_drafts_only_for_requests_that_name_it(self) -> None:
        network, cost = Network([0.01]), StepCostModel()
        passes = DraftPasses(cost)
        for _ in range(8):
            cost.measured(StepSample(10.0, 0, 0, 8, 8, 0, 0, 0))
            passes.record(8, 5.0)
        controller = SpeculationController({"net": network.entry(passes)}, "auto", cost)
        plan = [scheduled(str(name)) for name in range(8)]
        room = dict.fromkeys((sequence.request.request_id for sequence in plan), 8)
        assert not any(controller.propose(plan, room) for _ in range(40))
        assert network.kept[0] is None
        assert network.kept[-1] is not None
        plan.append(scheduled("named", "net"))
        room["named"] = 8
        assert all(list(controller.propose(plan, room)) == ["named"] for _ in range(10))
        assert network.kept[-10:] == [None] * 10
        assert len(network.kept) == 50

    def test_auto_selects_the_more_promising_draft(self) -> None:
        methods = {"short": Drafter([0.9], token=1), "long": Drafter([0.8, 0.8], token=2)}
        controller = SpeculationController(entries(methods), "auto")
        draft = controller.propose([scheduled("a")], {"a": 8})["a"]
        assert draft.token_ids == (2, 2)
        assert (draft.method, draft.first(1).method) == ("long", "long")

    def test_drawn_drafts_are_verified_whole(self) -> None:
        """Their number must not depend on what was drawn, and their later confidences do."""
        drafter = Drafter([0.01, 0.99, 0.01])
        drafter.probs = torch.full((3, 4), 0.25)
        controller = SpeculationController(entries({"drawn": drafter}), "auto")
        assert len(controller.propose([scheduled("a")], {"a": 8})["a"]) == 3

    def test_a_step_that_samples_nothing_gets_no_drafts(self) -> None:
        controller = SpeculationController(entries({"one": Drafter([0.9])}), "auto")
        request = Request("a", [1, 2, 3], SamplingParams(max_tokens=50))
        assert controller.propose([ScheduledSequence(request, 2)], {}) == {}

    def test_a_proposer_learns_whether_its_draft_was_verified(self) -> None:
        one, two, unasked = Drafter([0.9]), Drafter([0.2]), Drafter([0.9])
        controller = SpeculationController(entries({"one": one, "two": two, "no": unasked}, ["one", "two"]), "auto")
        sequence = scheduled("a")
        drafts = controller.propose([sequence], {"a": 8})
        controller.observe(VerifyResult(ScheduledSequence(sequence.request, 1, drafts["a"]), (), 5))
        assert (len(one.observed), len(two.observed), len(unasked.observed)) == (1, 1, 0)
        assert {name: own.num_drafted for name, own in controller.figures.by_method.items() if own.num_drafts} == {
            "one": 1
        }

    def test_a_method_requested_by_name_drafts_at_least_one_token(self) -> None:
        drafter = Drafter([0.9, 0.0, 0.9])
        controller = SpeculationController(entries({"one": drafter}), "one")
        assert len(controller.propose([scheduled("a")], {"a": 8})["a"]) == 1
        drafter.confidences = (0.01,)
        assert len(controller.propose([scheduled("a")], {"a": 8})["a"]) == 1

    def test_a_method_that_learns_from_every_node_gets_all_of_them(self) -> None:
        whole = RegisteredMethod(Drafter([0.9, 0.0, 0.9]), 4, is_verified_whole=True)
        controller = SpeculationController({"one": whole}, "one")
        assert len(controller.propose([scheduled("a")], {"a": 8})["a"]) == 3

    def test_a_failing_method_is_disabled(self) -> None:
        good, bad = Drafter([0.9]), Drafter([0.9], error=RuntimeError("this draft model is broken"))
        controller = SpeculationController(entries({"bad": bad, "good": good}), "auto")
        assert controller.propose([scheduled("a")], {"a": 8})["a"].token_ids == (9,)
        assert controller.num_failures == 1
        controller.propose([scheduled("a")], {"a": 8})
        assert controller.num_failures == 1

    def test_the_engine_frees_memory_once_for_a_method_that_lacks_it(self) -> None:
        drafter = Drafter([0.9])
        controller = SpeculationController(entries({"one": drafter}), "auto")
        for _ in range(2):
            drafter.error = torch.OutOfMemoryError("no memory")
            with pytest.raises(torch.OutOfMemoryError):
                controller.propose([scheduled("a")], {"a": 8})
            drafter.error = None
            assert controller.propose([scheduled("a")], {"a": 8})["a"].token_ids == (9,)
        assert controller.num_failures == 0

    def test_a_method_that_lacks_memory_twice_in_a_row_is_disabled(self) -> None:
        drafter = Drafter([0.9], error=torch.OutOfMemoryError("no memory"))
        controller = SpeculationController(entries({"one": drafter}), "auto")
        with pytest.raises(torch.OutOfMemoryError):
            controller.propose([scheduled("a")], {"a": 8})
        assert controller.propose([scheduled("a")], {"a": 8}) == {}
        assert controller.num_failures == 1

    def test_a_lost_device_is_not_attributed_to_the_method(self) -> None:
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        controller = SpeculationController(entries({"one": Drafter([0.9], error=error)}), "auto")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                controller.propose([scheduled("a")], {"a": 8})
        assert controller.num_failures == 0

    def test_unknown_defaults_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="ngram"):
            create_controller(SpeculationConfig(), build_runner(tiny_model("llama")), None, default="telepathy")

    def test_a_default_that_needs_a_draft_is_refused_without_one(self) -> None:
        with pytest.raises(ConfigError, match="no draft is loaded"):
            create_controller(SpeculationConfig(method="eagle3"), build_runner(tiny_model("llama")), None)


def test_configuration_and_workers_have_the_same_method_names() -> None:
    assert set(method_names()) == set(get_args(SpeculationMethod))


class TestFigures:
    def step(self, controller: SpeculationController, *sequences: ScheduledSequence) -> dict[str, Draft]:
        return controller.propose(sequences, {sequence.request.request_id: 8 for sequence in sequences})

    def test_drafts_are_counted_by_position_length_and_cost(self) -> None:
        controller = SpeculationController({"a": RegisteredMethod(Drafter([0.9, 0.9]), 8, is_automatic=True)}, "auto")
        sequence = scheduled("one")
        drafts = self.step(controller, sequence)
        controller.observe(VerifyResult(ScheduledSequence(sequence.request, 1, drafts["one"]), (9,), 5, (0,)))
        figures = controller.figures.by_method["a"]
        assert (figures.reached, figures.accepted, figures.chosen) == ([1, 1], [1, 0], [0, 1])
        assert figures.costs[1].per_token()[0] > 0
        assert (controller.figures.num_without_draft, controller.figures.recent_choice.value) == (0, 2.0)

    def test_auto_without_a_draft_is_counted_too_and_named_methods_are_not(self) -> None:
        controller = SpeculationController({"a": RegisteredMethod(Drafter([0.01]), 8, is_automatic=True)}, "auto")
        assert not self.step(controller, scheduled("one"))
        assert self.step(controller, scheduled("two", "a"))
        assert self.step(controller, scheduled("three", "none")) == {}
        assert (controller.figures.num_without_draft, controller.figures.by_method["a"].chosen) == (1, [])
        assert controller.figures.recent_choice.value == 0.0

    def test_the_worker_reports_them(self) -> None:
        controller = SpeculationController({"a": RegisteredMethod(Drafter([0.9, 0.9]), 8, is_automatic=True)}, "auto")
        sequence = scheduled("one")
        drafts = self.step(controller, sequence)
        controller.observe(VerifyResult(ScheduledSequence(sequence.request, 1, drafts["one"]), (9,), 5, (0,)))
        stats = worker_pb2.WorkerStats()
        fill_speculation(stats, controller, 0.25)
        [method] = stats.methods
        assert (method.method, method.num_drafted_tokens, method.num_accepted_tokens) == ("a", 2, 1)
        assert (list(method.reached), list(method.accepted), list(method.recent_acceptance)) == ([1, 1], [1, 0], [1, 0])
        assert [cost.size_class for cost in method.costs] == [1]
        assert (stats.speculation.default_method, stats.speculation.draft_share) == ("auto", 0.25)


def test_methods_take_their_lengths_from_the_configuration() -> None:
    config = SpeculationConfig(draft_tokens={"suffix": 32}, lookahead_window=2)
    runner = build_runner(tiny_model("llama"), decoder="transformers")
    assert assemble_speculation(config, runner, None).max_draft_tokens == 32
    text = [1, 2, 3, 4, 5, 6, 7] * 12
    request = Request("one", text, SamplingParams(max_tokens=50))
    request.num_computed_tokens = len(text) - 1
    plan = [ScheduledSequence(request, 1)]
    assert (
        len(METHODS["suffix"](config).method.propose(plan, {"one": METHODS["suffix"](config).max_tokens})["one"]) == 32
    )
    assert METHODS["ngram"](config).max_tokens == config.max_draft_tokens
    wide, narrow = (METHODS["lookahead"](each) for each in (SpeculationConfig(), config))
    sizes = [len(own.method.propose(plan, {"one": own.max_tokens})["one"]) for own in (wide, narrow)]
    assert sizes[1] <= sizes[0]
