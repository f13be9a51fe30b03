"""Chooses, per request and per step, who drafts and how much. To the engine it is one more proposer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from decode_worker.speculation.draft_length import DraftLengthPolicy, survival
from decode_worker.speculation.step_cost import StepCost
from engine.batch import ForwardBatch
from engine.drafts import Draft
from engine.request import Request
from engine.scheduler import ScheduledSequence
from engine.verification import Proposer, VerifyResult

logger = logging.getLogger(__name__)

AUTO = "auto"
NONE = "none"


class SpeculationController:
    """Implements :class:`engine.verification.Proposer` over several methods.

    Args:
        methods: by name.
        auto_methods: those that ``auto`` chooses from. Of several proposals for one request the one with most expected
            tokens is taken.
        default: for requests that do not choose: a method's name, ``auto`` or ``none``.
        max_draft_tokens: per request and step.
    """

    def __init__(
        self, methods: Mapping[str, Proposer], auto_methods: Collection[str], default: str, max_draft_tokens: int
    ) -> None:
        self._methods = dict(methods)
        self._auto_methods = frozenset(auto_methods)
        self._default = default
        self._max_draft_tokens = max_draft_tokens
        self._cost = StepCost()
        self._policy = DraftLengthPolicy(self._cost)
        self._proposed_by: dict[str, str] = {}
        self.num_failures = 0
        """Times that a method broke. Its requests went on without it."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """The drafts that are worth their verification."""
        best: dict[str, tuple[float, str, Draft]] = {}
        limits = {request_id: min(count, self._max_draft_tokens) for request_id, count in room.items()}
        for name, method in list(self._methods.items()):
            wanting = [s for s in plan if s.request.request_id in limits and self._may_use(s.request, name)]
            for request_id, draft in self._ask(name, method, wanting, limits).items():
                expected = sum(survival(draft.confidences))
                if request_id not in best or expected > best[request_id][0]:
                    best[request_id] = (expected, name, draft)
        lengths = self._policy.choose(
            {request_id: draft.confidences for request_id, (_, _, draft) in best.items()},
            num_sequences=sum(sequence.samples for sequence in plan),
            num_tokens=sum(sequence.num_tokens for sequence in plan),
        )
        self._proposed_by = {request_id: best[request_id][1] for request_id in lengths}
        return {request_id: best[request_id][2].first(length) for request_id, length in lengths.items()}

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        for method in self._methods.values():
            method.computed(batch, logits, results)

    def observe(self, result: VerifyResult) -> None:
        name = self._proposed_by.get(result.sequence.request.request_id)
        if name is not None and result.num_drafted and name in self._methods:
            self._methods[name].observe(result)

    def observe_step(self, num_tokens: int, ms: float) -> None:
        self._cost.record(num_tokens, ms)

    def release(self, request_id: str) -> None:
        self._proposed_by.pop(request_id, None)
        for method in self._methods.values():
            method.release(request_id)

    def _may_use(self, request: Request, name: str) -> bool:
        chosen = request.speculation_method or self._default
        return chosen == name or (chosen == AUTO and name in self._auto_methods)

    def _ask(
        self, name: str, method: Proposer, wanting: list[ScheduledSequence], room: Mapping[str, int]
    ) -> dict[str, Draft]:
        if not wanting:
            return {}
        try:
            return method.propose(wanting, room)
        except Exception:
            # A draft is only a bet: whatever is wrong with it, the requests go on without.
            logger.exception("the speculation method %s broke and is switched off", name)
            self.num_failures += 1
            del self._methods[name]
            return {}
