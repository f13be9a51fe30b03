"""Chooses, per request and per step, who drafts and how much. To the engine it is one more proposer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Proposer, VerifyResult
from baton.engine.draft.faults import DraftFaults
from baton.engine.draft.network import DraftState
from decode_worker.speculation.draft_length import (
    DraftingPolicy,
    DraftPasses,
    NetworkProposer,
    Outlook,
    VerificationPolicy,
)
from decode_worker.speculation.step_cost import StepCost
from decode_worker.speculation.tree import reach_probabilities

T = TypeVar("T")
logger = logging.getLogger(__name__)

AUTO = "auto"
NONE = "none"


@dataclass(slots=True)
class NetworkMethod:
    """A method whose drafts cost passes of a network, so that it is asked only when it is likely to pay.

    Attributes:
        state: of the network; hears of requests that were prefilled elsewhere.
        passes: keeps account of what its passes cost; the proposer knows it too.
    """

    name: str
    proposer: NetworkProposer
    state: DraftState
    passes: DraftPasses


@dataclass(frozen=True, slots=True)
class _Network:
    """The one method with a network, and when to ask it. It is switched off as a whole."""

    method: NetworkMethod
    drafting: DraftingPolicy

    @property
    def name(self) -> str:
        return self.method.name


@dataclass(slots=True)
class MethodCounts:
    """Since the worker started: drafts that were verified, the tokens in them, and those that were accepted."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class SpeculationController:
    """Implements :class:`baton.engine.contracts.Proposer` over several methods.

    Args:
        methods: without a network, by name.
        auto_methods: those of them that ``auto`` chooses from. Of several drafts for one request the one with most
            expected tokens is taken.
        default: for requests that do not choose: a method's name, ``auto`` or ``none``.
        max_draft_tokens: per request and step.
        most: the same for methods that may draft more or less.
        cost: of the target's steps; ``network`` knows the same one.
        network: one more method, of which ``auto`` makes use where the others have nothing better.
        whole: methods whose drafts are verified whole, since they learn from every node.
    """

    def __init__(
        self,
        methods: Mapping[str, Proposer],
        auto_methods: Collection[str],
        default: str,
        max_draft_tokens: int,
        most: Mapping[str, int] | None = None,
        cost: StepCost | None = None,
        network: NetworkMethod | None = None,
        whole: Collection[str] = (),
    ) -> None:
        self._methods = dict(methods)
        self._auto_methods = frozenset(auto_methods)
        self._default = default
        self._max_draft_tokens = max_draft_tokens
        self._most = dict(most or {})
        self._cost = cost or StepCost()
        self._verification = VerificationPolicy(self._cost)
        self._network = _Network(network, DraftingPolicy(self._cost, network.passes)) if network else None
        self._whole = frozenset(whole)
        self._proposed_by: dict[str, str] = {}
        self._drafters: dict[str, list[str]] = {}
        self._faults = DraftFaults()
        self.num_failures = 0
        """Times that a method broke. Its requests went on without it."""
        self.counts: dict[str, MethodCounts] = {}
        """By method, what was verified."""
        self.num_drafted = 0
        """Tokens that methods drafted, those that were not worth their verification included."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """The drafts that are worth their verification."""
        self._drafters, self._proposed_by = {}, {}
        wanting = [sequence for sequence in plan if sequence.request.request_id in room]
        names = {self._chosen_method(sequence.request) for sequence in wanting}
        num_sequences = sum(sequence.samples for sequence in plan)
        asks_others = not (names <= {AUTO, NONE} and self._verification.is_settled(num_sequences))
        network = self._network_to_ask(names, num_sequences)
        if not asks_others and network is None:  # most steps of a large batch
            self._keep_rows(names)
            return {}
        best: dict[str, tuple[float, str, Draft]] = {}
        for name in list(self._methods) if asks_others else ():
            asking = [s for s in wanting if self._may_use(s.request, name, name in self._auto_methods)]
            _keep_better(best, name, self._ask(name, asking, room))
        num_tokens = sum(sequence.num_tokens for sequence in plan)
        due = self._due(network, wanting, room, best, num_sequences, num_tokens) if network else []
        self._keep_rows(names)
        drafts = self._ask(network.name, due, room) if network else {}
        if network:
            _keep_better(best, network.name, drafts)
        chosen = self._choose(plan, best, num_sequences, num_tokens)
        self._proposed_by = {request_id: best[request_id][1] for request_id in chosen}
        if network and drafts:
            network.drafting.book(verified=network.name in self._proposed_by.values())
        return chosen

    def leaves_alone(self, plan: Sequence[ScheduledSequence]) -> bool:
        """An :data:`baton.engine.engine.AheadRule`: nobody drafts for these sequences, and no network follows them."""
        return self._network is None and all(self._chosen_method(s.request) == NONE for s in plan)

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Every method sees every forward, whether it drafted for it or not."""
        for name, method in self._all().items():
            self._guard(
                name,
                lambda method=method: method.computed(batch, logits, results),  # type: ignore[misc]
                None,
                in_step=True,
            )

    def observe(self, result: VerifyResult) -> None:
        request_id = result.sequence.request.request_id
        name = self._proposed_by.get(request_id)
        if name is not None and result.num_drafted:
            counts = self.counts.setdefault(name, MethodCounts())
            counts.num_drafts += 1
            counts.num_drafted += result.num_drafted
            counts.num_accepted += len(result.accepted)
        for drafter in self._drafters.get(request_id, ()):
            if (method := self._all().get(drafter)) is not None:
                self._guard(drafter, lambda method=method: method.observe(result), None)  # type: ignore[misc]

    def drafted_by(self, request_id: str) -> str | None:
        """The method whose draft the request's last step verified; None when it verified none."""
        return self._proposed_by.get(request_id)

    def adopt(self, request: Request, state: bytes | None, first_new: int) -> None:
        """A request comes with its prompt's KV; see :meth:`baton.engine.draft.network.DraftState.adopt`."""
        if self._network is None:
            return
        network = self._network.method
        try:
            network.state.adopt(request, state, first_new)
        except ValueError as error:  # the fault of this one hand-off: the request goes on as if no draft KV had come
            logger.warning("the draft state of request %s cannot be used: %s", request.request_id, error)
            self.num_failures += 1
            self._guard(network.name, lambda: network.state.adopt(request, None, first_new), None)
        except Exception as error:
            if self._faults.is_for_engine(network.name, error, in_step=False):
                raise
            logger.exception("the speculation method %s broke and is switched off", network.name)
            self._switch_off(network.name)

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        self._cost.record(num_sequences, num_tokens, ms)

    def release(self, request_id: str) -> None:
        self._proposed_by.pop(request_id, None)
        for name, method in self._all().items():
            self._guard(name, lambda method=method: method.release(request_id), None)  # type: ignore[misc]

    def _all(self) -> dict[str, Proposer]:
        own = {} if self._network is None else {self._network.name: self._network.method.proposer}
        return {**self._methods, **own}

    def _chosen_method(self, request: Request) -> str:
        return request.speculation_method or self._default

    def _may_use(self, request: Request, name: str, is_automatic: bool) -> bool:
        chosen = self._chosen_method(request)
        return chosen == name or (chosen == AUTO and is_automatic)

    def _choose(
        self,
        plan: Sequence[ScheduledSequence],
        best: Mapping[str, tuple[float, str, Draft]],
        num_sequences: int,
        num_tokens: int,
    ) -> dict[str, Draft]:
        """As much of each draft as pays; for who asked for a method by name, at least a token.

        Drafts that were drawn are verified whole: their number must not depend on what was drawn.
        """
        weighed: dict[str, Draft] = {}
        chosen: dict[str, Draft] = {}
        named: set[str] = set()
        for sequence in plan:
            request_id = sequence.request.request_id
            if request_id in best:
                _, name, draft = best[request_id]
                is_weighed = name not in self._whole and draft.probs is None
                (weighed if is_weighed else chosen)[request_id] = draft
                if self._chosen_method(sequence.request) != AUTO:
                    named.add(request_id)
        num_tokens += sum(len(draft) for draft in chosen.values())
        lengths = self._verification.choose(weighed, named, num_sequences, num_tokens, is_drafting=bool(chosen))
        chosen |= {request_id: weighed[request_id].first(count) for request_id, count in lengths.items()}
        return {request_id: draft.guessed_by(best[request_id][1]) for request_id, draft in chosen.items()}

    def _network_to_ask(self, names: Collection[str], num_sequences: int) -> _Network | None:
        """The network, where its drafts are to be thought about at all. Asked once a step."""
        network = self._network
        if network is None:
            return None
        asks = network.name in names or (AUTO in names and not network.drafting.is_settled(num_sequences))
        return network if asks else None

    def _due(
        self,
        network: _Network,
        wanting: Sequence[ScheduledSequence],
        room: Mapping[str, int],
        best: Mapping[str, tuple[float, str, Draft]],
        num_sequences: int,
        num_tokens: int,
    ) -> list[ScheduledSequence]:
        """Those that the network should draft for, in view of the drafts that there are."""
        named = {s.request.request_id for s in wanting if self._chosen_method(s.request) == network.name}
        candidates = [s.request for s in wanting if self._may_use(s.request, network.name, is_automatic=True)]
        most = self._room_of(network.name, candidates, room)
        outlook = self._guard(network.name, lambda: network.method.proposer.outlook(candidates, most), Outlook({}))
        gains = {
            request_id: own
            for request_id, own in outlook.gains.items()
            if request_id in named or sum(own) > best.get(request_id, (0.0,))[0]
        }
        if not gains:
            return []
        chosen = network.drafting.choose(replace(outlook, gains=gains), named, num_sequences, num_tokens)
        return [s for s in wanting if s.request.request_id in chosen]

    def _keep_rows(self, names: Collection[str]) -> None:
        """Tells the network how much of each sequence it must be able to draft from."""
        if (network := self._network) is not None:
            num_rows = None if network.name in names else network.drafting.num_kept_rows
            self._guard(network.name, lambda: network.method.state.keep(num_rows), None)

    def _ask(self, name: str, wanting: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        method = self._all().get(name)
        if not wanting or method is None:
            return {}
        asked = self._room_of(name, [s.request for s in wanting], room)
        drafts: dict[str, Draft] = self._guard(name, lambda: method.propose(wanting, asked), {}, in_step=True)
        self.num_drafted += sum(map(len, drafts.values()))
        for request_id in drafts:
            self._drafters.setdefault(request_id, []).append(name)
        return drafts

    def _room_of(self, name: str, requests: Sequence[Request], room: Mapping[str, int]) -> dict[str, int]:
        most = self._most.get(name, self._max_draft_tokens)
        return {request.request_id: min(most, room[request.request_id]) for request in requests}

    def _guard(self, name: str, work: Callable[[], T], otherwise: T, *, in_step: bool = False) -> T:
        """A draft is only a bet: whatever is wrong with it, the requests go on without.

        Args:
            in_step: the engine tries the step again if ``work`` lacks memory.

        Raises:
            Exception: see :class:`DraftFaults`.
        """
        try:
            result = work()
        except Exception as error:
            if self._faults.is_for_engine(name, error, in_step=in_step):
                raise
            logger.exception("the speculation method %s broke and is switched off", name)
            self._switch_off(name)
            return otherwise
        if in_step:
            self._faults.went_well(name)
        return result

    def _switch_off(self, name: str) -> None:
        self.num_failures += 1
        self._methods.pop(name, None)
        if self._network is not None and self._network.name == name:
            self._network = None


def _keep_better(best: dict[str, tuple[float, str, Draft]], name: str, drafts: Mapping[str, Draft]) -> None:
    for request_id, draft in drafts.items():
        expected = sum(reach_probabilities(draft))
        # What was drawn was asked for because it promised more; what came out must not change that.
        is_better = draft.probs is not None or request_id not in best or expected > best[request_id][0]
        if len(draft) and is_better:
            best[request_id] = (expected, name, draft)
