"""Chooses for each request and step which method drafts, and how much. To the engine it is one more proposer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from baton.core.drafts import NO_DRAFT, Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.draft.network import DraftFaults, DraftState
from baton.engine.scheduling.step_cost_model import StepCostModel
from decode_worker.speculation.draft_figures import DraftFigures, FigureBook, num_reached, traffic_kind
from decode_worker.speculation.draft_length import DraftingPolicy, DraftPasses, VerificationPolicy
from decode_worker.speculation.draft_step import DraftStep
from decode_worker.speculation.forced import within_grammars
from decode_worker.speculation.method import DraftMethod, Outlook, ReadsForwards
from decode_worker.speculation.shadow import ShadowDrafts
from decode_worker.speculation.tree import reach_probabilities

T = TypeVar("T")
logger = logging.getLogger(__name__)

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class RegisteredMethod:
    """A method, and how the controller treats it.

    Attributes:
        max_tokens: maximum number of tokens that it drafts, per request and step.
        is_automatic: requests with ``auto`` may get its drafts. Of several drafts the one with most expected tokens is
            taken.
        joins_others: requests with any other method than ``none`` may get its drafts, too.
        is_verified_whole: its drafts are never cut, since it learns from every node.
        passes: the cost of its network's passes. ``None`` for a method without a network.
        state: its network's state, which the controller keeps in step with the target and which takes over requests
            that were prefilled elsewhere.
    """

    method: DraftMethod
    max_tokens: int
    is_automatic: bool = False
    joins_others: bool = False
    is_verified_whole: bool = False
    passes: DraftPasses | None = None
    state: DraftState | None = None


class SpeculationController:
    """Implements :class:`baton.engine.contracts.Proposer` over several methods.

    It asks the methods in their order, so that later ones draft only for requests for which they promise more than the
    drafts at hand. A method that raises is switched off, and its requests go on without it.

    Args:
        methods: methods by name.
        default: for requests that do not choose: a method's name, ``auto`` or ``none``; also an attribute.
        costs: cost of the target's steps; the methods' ``passes`` must use the same object.
        shadow: drafts that are only compared with the tokens of requests without speculation.
    """

    def __init__(
        self,
        methods: Mapping[str, RegisteredMethod],
        default: str,
        costs: StepCostModel | None = None,
        shadow: ShadowDrafts | None = None,
    ) -> None:
        self.shadow = shadow
        self._methods = dict(methods)
        self._readers = {name: own.method for name, own in methods.items() if isinstance(own.method, ReadsForwards)}
        self.default = default
        self.costs = costs or StepCostModel()
        """Learns in the engine that this controller drafts for; pass it to that engine."""
        self._verification = VerificationPolicy(self.costs)
        self._drafting = {
            name: DraftingPolicy(self.costs, own.passes or DraftPasses(self.costs)) for name, own in methods.items()
        }
        self._proposed_by: dict[str, str] = {}
        self._drafters: dict[str, list[str]] = {}
        self._faults = DraftFaults()
        self._is_profiled = False
        self.num_failures = 0
        """The number of times that a method failed."""
        self.figures = FigureBook()
        """What was measured of verified drafts."""
        self.num_drafted = 0
        """Tokens that methods drafted, including those that were not worth their verification."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """The drafts that are worth their verification."""
        drafts = self._propose(plan, room)
        if self.shadow is not None:
            self._draft_in_shadow(self.shadow, plan, room)
        return drafts

    def _propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        self._drafters, self._proposed_by = {}, {}
        step = DraftStep.of(plan, room)
        names = {self._chosen_method(sequence.request) for sequence in step.wanting}
        asked = self._methods_to_ask(names, step.num_sequences)
        if not asked:  # most steps of a large batch
            for name in list(self._methods):
                self._keep_rows(name, names)
            self._count_choices(step.wanting, {})
            return {}
        best: dict[str, tuple[float, str, Draft]] = {}
        drafters: list[str] = []
        for name in list(self._methods):
            due, own_room = self._due(name, step, best) if name in asked else ([], {})
            self._keep_rows(name, names)
            if due and (drafts := self._ask_timed(name, due, own_room, step, self.figures.of(name))):
                drafters.append(name)
                _keep_better(best, name, drafts)
        chosen = self._choose(plan, best, step)
        self._proposed_by = {request_id: best[request_id][1] for request_id in chosen}
        for name in drafters:
            self._drafting[name].book(verified=name in self._proposed_by.values())
        self._count_choices(step.wanting, chosen)
        return chosen

    def leaves_alone(self, plan: Sequence[ScheduledSequence]) -> bool:
        """An :data:`baton.engine.engine.AheadRule`: no method drafts for these sequences, and no network follows
        them."""
        follows = any(own.state is not None for own in self._methods.values())
        if follows or not all(self._chosen_method(s.request) == NONE for s in plan):
            return False
        if self.shadow is None or self.shadow.method not in self._methods:
            return True
        is_due = self.shadow.is_due
        if not is_due:
            self.shadow.skip()
        return not is_due

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Shows every forward to the methods that read forwards, whether they drafted for it or not."""
        for name, method in list(self._readers.items()):
            self._guard(
                name,
                lambda method=method: method.computed(batch, logits, results),  # type: ignore[misc]
                None,
                in_step=True,
            )

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Inside, drafts are for synthetic requests: their costs are learned, and nothing else of them remains."""
        self._is_profiled = True
        try:
            yield
        finally:
            self._is_profiled, self.num_drafted, self.figures = False, 0, FigureBook()

    @property
    def network_method(self) -> str | None:
        """The name of the method with a network, if one is loaded."""
        return next((name for name, own in self._methods.items() if own.passes is not None), None)

    def observe(self, result: VerifyResult) -> None:
        if self._is_profiled:
            return
        request = result.sequence.request
        request_id = request.request_id
        name = self._proposed_by.get(request_id)
        if name is not None and result.num_drafted:
            draft = result.sequence.draft
            reached = num_reached(draft, result.nodes)
            self.figures.of(name).judged(traffic_kind(request), result.num_drafted, len(result.accepted), reached)
        if self.shadow is not None:
            self.shadow.observe(request_id, result.token_ids)
        for drafter in self._drafters.get(request_id, ()):
            if (own := self._methods.get(drafter)) is not None:
                self._guard(drafter, lambda own=own: own.method.observe(result), None)  # type: ignore[misc]

    def drafted_by(self, request_id: str) -> str | None:
        """The method whose draft the request's last step verified; ``None`` when it verified none."""
        return self._proposed_by.get(request_id)

    def adopt(self, request: Request, state: bytes | None, first_new: int) -> None:
        """Takes over a request that arrives with its prompt's KV; see
        :meth:`baton.engine.draft.network.DraftState.adopt`."""
        for name, own in list(self._methods.items()):
            if own.state is not None:
                self._adopt(name, own.state, request, state, first_new)

    def release(self, request_id: str) -> None:
        self._proposed_by.pop(request_id, None)
        if self.shadow is not None:
            self.shadow.release(request_id)
        for name, own in list(self._methods.items()):
            self._guard(name, lambda own=own: own.method.release(request_id), None)  # type: ignore[misc]

    def _chosen_method(self, request: Request) -> str:
        return request.speculation_method or self.default

    def _may_use(self, request: Request, name: str) -> bool:
        chosen, own = self._chosen_method(request), self._methods[name]
        return chosen == name or (own.joins_others and chosen != NONE) or (own.is_automatic and chosen == AUTO)

    def _methods_to_ask(self, names: set[str], num_sequences: int) -> set[str]:
        """The methods that may draft in this step. Call once per step.

        Args:
            names: the methods that the step's requests ask for.
        """
        looks = not (names <= {AUTO, NONE} and self._verification.is_settled(num_sequences))
        asked: set[str] = set()
        for name, own in self._methods.items():
            if own.passes is None:
                is_asked = looks
            else:
                is_asked = name in names or (AUTO in names and not self._drafting[name].is_settled(num_sequences))
            if is_asked:
                asked.add(name)
        return asked

    def _due(
        self, name: str, step: DraftStep, best: Mapping[str, tuple[float, str, Draft]]
    ) -> tuple[list[ScheduledSequence], dict[str, int]]:
        """The sequences for which a method should draft, given the drafts so far, and its room."""
        own = self._methods[name]
        candidates = [sequence for sequence in step.wanting if self._may_use(sequence.request, name)]
        if not candidates:
            return [], {}
        requests = [sequence.request for sequence in candidates]
        room = {r.request_id: min(own.max_tokens, step.room[r.request_id]) for r in requests}
        nothing: Outlook | None = Outlook({})
        outlook = self._guard(name, lambda: own.method.outlook(requests, room), nothing)
        if outlook is None:
            return candidates, room
        named = {request.request_id for request in requests if self._chosen_method(request) == name}
        gains = {
            request_id: expected
            for request_id, expected in outlook.gains.items()
            if request_id in named or sum(expected) > best.get(request_id, (0.0,))[0]
        }
        if not gains:
            return [], {}
        outlook = replace(outlook, gains=gains)
        chosen = self._drafting[name].choose(outlook, named, step.num_sequences, step.num_tokens, step.context_tokens)
        return [sequence for sequence in candidates if sequence.request.request_id in chosen], room

    def _keep_rows(self, name: str, names: Collection[str]) -> None:
        """Tells a network how much of each sequence it must be able to draft from."""
        own = self._methods.get(name)
        if own is not None and (state := own.state) is not None:
            num_rows = None if name in names else self._drafting[name].num_kept_rows
            self._guard(name, lambda: state.keep(num_rows), None)

    def _draft_in_shadow(
        self, shadow: ShadowDrafts, plan: Sequence[ScheduledSequence], room: Mapping[str, int]
    ) -> None:
        """In due steps, drafts for the sequences without speculation; nothing of that is verified."""
        own = self._methods.get(shadow.method)
        has_drafted = any(shadow.method in drafters for drafters in self._drafters.values())
        # A method drafts once a step: requests that get its drafts take precedence.
        if own is None or not shadow.is_due or has_drafted:
            shadow.skip()
            return
        step = DraftStep.of(plan, room)
        due = [s for s in step.wanting if self._may_shadow(shadow, s.request)]
        if not due:
            return
        shadow.begin()
        if own.passes is not None:
            own.passes.rate = None  # whole drafts, since nothing has to pay
        own_room = {s.request.request_id: min(own.max_tokens, room[s.request.request_id]) for s in due}
        drafts = self._ask_timed(shadow.method, due, own_room, step, shadow.figures)
        for request in (s.request for s in due):
            if (draft := drafts.get(request.request_id)) is not None:
                shadow.keep(request, draft)

    def _may_shadow(self, shadow: ShadowDrafts, request: Request) -> bool:
        return self._chosen_method(request) == NONE and not shadow.is_followed(request.request_id)

    def _count_choices(self, wanting: Sequence[ScheduledSequence], chosen: Mapping[str, Draft]) -> None:
        """Counts how much was drafted for each sequence with ``auto``."""
        requests = [sequence.request for sequence in wanting if self._chosen_method(sequence.request) == AUTO]
        self.figures.chose([chosen.get(request.request_id, NO_DRAFT) for request in requests])

    def _ask_timed(
        self,
        name: str,
        due: Sequence[ScheduledSequence],
        room: Mapping[str, int],
        step: DraftStep,
        figures: DraftFigures,
    ) -> dict[str, Draft]:
        """Asks a method for drafts, and adds what they cost to its figures."""
        started_s = time.perf_counter()
        drafts = self._ask(name, due, room)
        drafting_ms = (time.perf_counter() - started_s) * 1e3
        size, context = step.num_sequences, step.context_tokens
        plain_ms = self.costs.ms(size, size, context)
        verifying_ms = self.costs.ms(size, size + 1, context) - plain_ms
        figures.cost(size, drafting_ms, verifying_ms, plain_ms, sum(map(len, drafts.values())))
        return drafts

    def _ask(self, name: str, due: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        own = self._methods.get(name)
        if not due or own is None:
            return {}
        drafts: dict[str, Draft] = self._guard(name, lambda: own.method.propose(due, room), {}, in_step=True)
        if not own.is_verified_whole:
            drafts = within_grammars(due, drafts)
        self.num_drafted += sum(map(len, drafts.values()))
        for request_id in drafts:
            self._drafters.setdefault(request_id, []).append(name)
        return drafts

    def _choose(
        self, plan: Sequence[ScheduledSequence], best: Mapping[str, tuple[float, str, Draft]], step: DraftStep
    ) -> dict[str, Draft]:
        """As much of each draft as pays; a token at least for requests that asked for the method by name.

        Drafts that were drawn are verified whole: their number must not depend on what was drawn.
        """
        weighed: dict[str, Draft] = {}
        chosen: dict[str, Draft] = {}
        named: set[str] = set()
        for sequence in plan:
            request_id = sequence.request.request_id
            if request_id in best:
                _, name, draft = best[request_id]
                is_whole = self._methods[name].is_verified_whole or draft.probs is not None
                (chosen if is_whole else weighed)[request_id] = draft
                if self._chosen_method(sequence.request) != AUTO:
                    named.add(request_id)
        num_tokens = step.num_tokens + sum(len(draft) for draft in chosen.values())
        lengths = self._verification.choose(
            weighed, named, step.num_sequences, num_tokens, step.context_tokens, is_drafting=bool(chosen)
        )
        chosen |= {request_id: weighed[request_id].first(count) for request_id, count in lengths.items()}
        return {request_id: draft.guessed_by(best[request_id][1]) for request_id, draft in chosen.items()}

    def _adopt(self, name: str, own: DraftState, request: Request, state: bytes | None, first_new: int) -> None:
        def adopt() -> None:
            try:
                own.adopt(request, state, first_new)
            except ValueError as error:  # affects only this hand-off: the request continues without draft KV
                logger.warning("the draft state of request %s cannot be used: %s", request.request_id, error)
                self.num_failures += 1
                own.adopt(request, None, first_new)

        self._guard(name, adopt, None)

    def _guard(self, name: str, work: Callable[[], T], otherwise: T, *, in_step: bool = False) -> T:
        """Does a method's work. If it raises, the method is switched off and ``otherwise`` is returned.

        Args:
            in_step: the engine tries the step again if ``work`` lacks memory.

        Raises:
            Exception: the error is not the method's fault; see :class:`DraftFaults`.
        """
        try:
            result = work()
        except Exception as error:
            if self._faults.is_for_engine(name, error, in_step=in_step):
                raise
            logger.exception("the speculation method %s failed and is disabled", name)
            self.num_failures += 1
            self._methods.pop(name, None)
            self._readers.pop(name, None)
            return otherwise
        if in_step:
            self._faults.went_well(name)
        return result


def _keep_better(best: dict[str, tuple[float, str, Draft]], name: str, drafts: Mapping[str, Draft]) -> None:
    for request_id, draft in drafts.items():
        expected = sum(reach_probabilities(draft))
        # A drawn draft was requested because it promised more; the drawn tokens must not change that choice.
        is_better = draft.probs is not None or request_id not in best or expected > best[request_id][0]
        if len(draft) and is_better:
            best[request_id] = (expected, name, draft)
