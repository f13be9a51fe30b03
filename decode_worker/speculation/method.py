"""The contract of a speculation method.

Within a step the controller calls ``outlook``, then ``propose`` for the requests that are worth a draft. The target
computes and verifies the drafts, then come ``computed`` and ``observe``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult


@dataclass(frozen=True, slots=True)
class Outlook:
    """The accepted tokens that a method expects, by request and depth.

    Attributes:
        gains: by request id, the expected number of accepted tokens that each further pass of the method adds.
        nodes_per_pass: drafted tokens that each pass adds to those to verify, per request.
    """

    gains: Mapping[str, tuple[float, ...]]
    nodes_per_pass: float = 1.0


class DraftMethod(Protocol):
    """A speculation method. It may propose anything: verification keeps only what the target agrees with."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts by request id, for those sequences that the method has a guess for.

        ``Draft.confidences`` says how likely each token is to be accepted; the controller cuts drafts by it.

        Args:
            plan: sequences of the step.
            room: maximum number of tokens to draft, by request id. Other requests get no draft.
        """
        ...

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        """The expected gain of drafting for these requests, judged by recent steps.

        The controller weighs it against the cost of drafting, and proposes for the requests that are worth it. Return
        ``None`` if drafting costs next to nothing: the controller then asks for all drafts, and goes by their
        confidences.

        Args:
            requests: candidates of one step.
            room: maximum number of tokens to draft, by request id.
        """
        ...

    def observe(self, result: VerifyResult) -> None:
        """Learns the outcome of a step for a request that the method drafted for, even if its draft was cut or lost to
        another method's: ``result.sequence.draft`` is what was verified."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request that ended."""
        ...


@runtime_checkable
class ReadsForwards(Protocol):
    """A method that also reads the target's logits or hidden states."""

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Sees every forward of the target; see :meth:`baton.engine.contracts.Proposer.computed`."""
        ...
