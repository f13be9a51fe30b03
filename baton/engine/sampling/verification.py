"""From a step's logits to each sequence's new tokens. The contracts of speculation live here; the methods and the
verifier that handles drafts belong to the decode role, which injects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.drafts import Draft
from baton.core.request import Request, TokenLogprobs
from baton.engine.batch.batch import ForwardBatch
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import QueuedSample, SampledToken, queue_sample
from baton.engine.scheduling.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """One sequence's outcome of a step.

    Attributes:
        accepted: drafted tokens that the target agrees with, in order.
        next_token: the recovered token after a rejection, or the bonus token after a full acceptance; None when the
            model's logits were not numbers.
        nodes: where the accepted tokens are in the draft; a path from below the root.
        logprobs: one for each of ``accepted + next_token``, if asked for.
    """

    sequence: ScheduledSequence
    accepted: tuple[int, ...]
    next_token: int | None
    nodes: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def num_drafted(self) -> int:
        """Tokens that were verified."""
        return len(self.sequence.draft)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.accepted if self.next_token is None else (*self.accepted, self.next_token)


class Proposer(Protocol):
    """A speculation method. Within a step: propose → forward → verify → computed → observe."""

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for those of the plan's sequences that it can guess for, by request id.

        Args:
            plan: the step's sequences.
            room: how many tokens may be drafted, by request id; there are slots for them in the cache. No draft is
                wanted for requests that are not in it.
        """
        ...

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Sees a forward while its hidden states are at hand; its KV is in the cache, accepted nodes in their places.

        Args:
            batch: as it was computed; its requests do not know their new tokens yet.
            logits: ``[num_rows, vocab_size]`` of the batch.
            results: of the sequences that have logits, by request id.
        """
        ...

    def observe(self, result: VerifyResult) -> None:
        """Learns what came of a sequence: of each that something was drafted for, whether it was verified or not."""
        ...

    def observe_step(self, num_sequences: int, num_tokens: int, ms: float) -> None:
        """Learns what a forward of so many tokens, drafts included, and its verification took."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request that ended."""
        ...


class Verifier(Protocol):
    """Decides which tokens a step yields."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        """One result for each sequence that has logits (``[num_rows, vocab_size]``, float32) in this step."""
        ...


def sampling_row(request: Request, drafts: Sequence[int] = ()) -> SamplingRow:
    """The row that follows the request's known tokens and then the drafted tokens ``drafts``."""
    forbidden: frozenset[int] = frozenset()
    if request.params.min_tokens:
        forbidden = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            forbidden |= request.eos_token_ids
    return SamplingRow(
        params=request.params,
        position=request.num_tokens + len(drafts),
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[*request.output_token_ids, *drafts] if drafts else request.output_token_ids,
        forbidden=forbidden,
    )


class ChosenTokens:
    """A step's tokens without drafts, chosen on the device and on their way to the host.

    Attributes:
        sequences: those that get one each.
        token_ids: int64 ``[num_sequences]``, on the device.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence], queued: QueuedSample) -> None:
        self.sequences = sequences
        self.token_ids = queued.token_ids
        self._queued = queued

    def read(self) -> list[VerifyResult]:
        """Waits for the step, also for one that chooses none; for nothing that was queued behind it."""
        return [
            VerifyResult(sequence, (), token.token_id, logprobs=logprobs_of([token]))
            for sequence, token in zip(self.sequences, self._queued.read(), strict=True)
        ]


def choose_tokens(batch: ForwardBatch, logits: torch.Tensor) -> ChosenTokens:
    """What every verifier makes of a step without drafts, as soon as its logits are queued."""
    ready = [sequence for sequence, rows in zip(batch.sequences, batch.rows_of, strict=True) if len(rows)]
    return ChosenTokens(ready, queue_sample(logits, [sampling_row(sequence.request) for sequence in ready]))


class PlainSampling:
    """Verification with no drafts: every row is sampled and is the next token."""

    def verify(self, batch: ForwardBatch, logits: torch.Tensor) -> list[VerifyResult]:
        return choose_tokens(batch, logits).read()


def logprobs_of(tokens: Sequence[SampledToken]) -> tuple[TokenLogprobs, ...] | None:
    """The tokens' log probabilities, or None when the request did not ask for any."""
    found = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return found or None
