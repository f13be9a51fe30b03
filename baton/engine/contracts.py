"""Interfaces of speculation methods, verifiers and draft networks. The decode role injects implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.kv_spec import LayerSpec
from baton.core.request import TokenLogprobs
from baton.core.step_costs import StepSample
from baton.engine.batch.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Outcome of a step for one sequence.

    Attributes:
        accepted: drafted tokens that the target agrees with, in order.
        next_token: the recovered token after a rejection, or the bonus token after a full acceptance; ``None`` when the
            model's logits were not finite.
        nodes: nodes of the accepted tokens in the draft; a path from below the root.
        logprobs: one for each of ``accepted + next_token``, if the request asked for them.
    """

    sequence: ScheduledSequence
    accepted: tuple[int, ...]
    next_token: int | None
    nodes: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def num_drafted(self) -> int:
        """Number of tokens that were verified."""
        return len(self.sequence.draft)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.accepted if self.next_token is None else (*self.accepted, self.next_token)


class StepObserver:
    """Watches an engine's steps, in the engine's thread. Subclasses override what they need."""

    def scheduled(self, plan: Sequence[ScheduledSequence]) -> None:
        """Called with each step's plan before it runs."""

    def computed(self, plan: Sequence[ScheduledSequence]) -> None:
        """Called after the forward, before requests finish.

        The plan's KV is in the cache; on a GPU it will be once the stream reaches this point.
        """

    def measured(self, sample: StepSample) -> None:
        """Called with what each step cost."""


class Proposer(Protocol):
    """A speculation method. Within a step: propose → forward → verify → computed → observe."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Returns drafts by request id, for those of the plan's sequences that the method can guess for.

        Args:
            plan: the step's sequences.
            room: how many tokens may be drafted, by request id; the cache has slots for them. Requests that are not in
                it get no draft.
        """
        ...

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Reads a forward's hidden states while they are available; accepted nodes' KV is in its final place.

        Args:
            batch: the batch as computed; its requests do not have their new tokens yet.
            logits: ``[num_rows, vocab_size]`` of the batch.
            results: results of the sequences that have logits, by request id.
        """
        ...

    def observe(self, result: VerifyResult) -> None:
        """Learns from the result of a sequence that had a draft, whether or not the draft was verified."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request that ended."""
        ...


class Verifier(Protocol):
    """Decides which tokens a step yields."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """Returns one result for each sequence that has logits (``[num_rows, vocab_size]``, float32) in this step."""
        ...


class DraftNetwork(Protocol):
    """A draft network that keeps KV in the target's blocks, or reads the target's hidden states, or both.

    Attributes:
        feature_layers: target layers whose hidden states it reads; see ``FeatureTap``.
        layer_specs: shapes of its KV, layer by layer.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]: ...

    def fingerprint(self) -> str:
        """Hex digest of everything that it computes with. Reads all its weights."""
        ...
