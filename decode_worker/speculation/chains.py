"""Chains of drafts that a network grows by one token per pass, for EAGLE heads and draft models alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from baton.core.drafts import Draft
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import VerifyResult
from baton.engine.device.downloads import fetch, is_on_host
from baton.engine.device.uploads import take_rows
from baton.engine.sampling.logits import process_logits
from baton.engine.sampling.sampler import probabilities
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation.acceptance import AcceptanceTracker, DepthAcceptance, bucket_of, num_right, prior_of
from decode_worker.speculation.acceptance_rules import draw_drafts
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.method import Outlook

_DEEPEST_KEY = 4
_PRIOR_AT_DEPTH = 0.5


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of similar guesses, which share an acceptance estimate.

    Attributes:
        bucket: bucket of the likeliest token's probability. It does not depend on the drawn token, because the rule
            for drawn drafts requires that the number of drafts does not.
    """

    depth: int
    bucket: int
    is_greedy: bool
    is_drawn: bool

    @property
    def prior(self) -> float:
        return prior_of(self.bucket)


@dataclass(slots=True)
class Chain:
    """A growing draft.

    Attributes:
        room: maximum number of tokens.
        probs: one ``[vocab_size]`` per token if they are drawn; see :class:`baton.core.drafts.Draft`.
        kinds: kinds of the tokens, which determine the confidences.
        survival: the chance that all tokens are accepted.
    """

    request: Request
    room: int
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    kinds: list[_Kind] = field(default_factory=list)
    survival: float = 1.0

    def draft(self) -> Draft:
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.token_ids), confidences=tuple(self.confidences), probs=probs)


class VocabularyMap:
    """Maps the columns of a draft's logits to the target's tokens.

    Args:
        target_ids: int64 ``[num_columns]``, all different.
        target_size: columns of the target's logits.
    """

    def __init__(self, target_ids: torch.Tensor, target_size: int) -> None:
        self._target_ids = target_ids
        self._target_size = target_size

    def to_target(self, columns: torch.Tensor) -> torch.Tensor:
        return self._target_ids[columns]

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """``[num_rows, num_columns]`` → ``[num_rows, target_size]``; tokens outside the draft's get ``-inf``."""
        out = logits.new_full((logits.shape[0], self._target_size), float("-inf"))
        out[:, self._target_ids] = logits
        return out


class ChainPasses(Protocol):
    """The passes of a draft network in one step, over some sequences at once."""

    def first(self) -> torch.Tensor:
        """Ingests the tokens of the sequences that the draft has not seen.

        Returns:
            Logits ``[num_sequences, num_columns]`` of the token after each sequence's last.
        """
        ...

    def next(self, kept: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Continues some of the sequences of the previous pass.

        Args:
            kept: ascending indices of these sequences.
            token_ids: the target's id of the latest guess for each.

        Returns:
            Logits ``[len(kept), num_columns]``.
        """
        ...


class ChainDrafter:
    """Grows chains pass by pass, and learns their acceptance.

    Args:
        vocabulary: the draft's vocabulary.
        passes: decides when a further pass no longer pays.
        draws: True draws the tokens of sampled requests from the draft's processed distribution, which the verifier
            must be able to judge; False always takes the likeliest token.
    """

    def __init__(self, vocabulary: VocabularyMap, passes: DraftPasses, *, draws: bool) -> None:
        self._vocabulary = vocabulary
        self._passes = passes
        self._draws = draws
        self._by_kind = AcceptanceTracker()
        self._by_depth = DepthAcceptance(_PRIOR_AT_DEPTH)
        self._chains: dict[str, Chain] = {}

    def draft(self, chains: Sequence[Chain], network: ChainPasses) -> dict[str, Draft]:
        """Drafts by request id.

        Args:
            chains: empty ones with room for one token at least, in the order of the network's sequences.
        """
        started_s = time.monotonic()
        active = list(chains)
        logits = network.first()
        while True:
            self._extend(active, logits.float())
            now_s = time.monotonic()
            self._passes.record(len(active), (now_s - started_s) * 1e3)
            started_s = now_s
            kept = [index for index, chain in enumerate(active) if len(chain.token_ids) < chain.room]
            if not kept or not self._passes.another([self._next_chance(active[index]) for index in kept]):
                break
            active = [active[index] for index in kept]
            logits = network.next(kept, [chain.token_ids[-1] for chain in active])
        self._chains = {chain.request.request_id: chain for chain in chains}
        return {chain.request.request_id: chain.draft() for chain in chains if chain.token_ids}

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        """The chains' outlook; see :class:`~.method.DraftMethod`."""
        return Outlook(
            {request.request_id: self._by_depth.reach(request, room[request.request_id]) for request in requests}
        )

    def observe(self, result: VerifyResult) -> None:
        """Learns how far the whole chain agrees with the output, even if only a part was verified."""
        chain = self._chains.get(result.sequence.request.request_id)
        if chain is None:
            return
        known, right = min(len(chain.kinds), len(result.token_ids)), num_right(chain.token_ids, result.token_ids)
        self._by_kind.record_chain(known, right, lambda depth: (chain.kinds[depth], chain.kinds[depth].prior))
        self._by_depth.learn(chain.request, known, right)

    def release(self, request_id: str) -> None:
        self._chains.pop(request_id, None)
        self._by_depth.forget(request_id)

    def _next_chance(self, chain: Chain) -> float:
        """The chance that one more draft would be accepted, before it is made."""
        return chain.survival * self._by_depth.chance(chain.request, len(chain.token_ids))

    def _extend(self, chains: Sequence[Chain], logits: torch.Tensor) -> None:
        """Adds a token to each chain."""
        processed = [index for index, chain in enumerate(chains) if self._is_processed(chain.request)]
        plain = [index for index in range(len(chains)) if index not in processed]
        if plain:
            token_ids, certainties = likeliest(take_rows(logits, plain), self._vocabulary.to_target)
            for index, token, certainty in zip(plain, token_ids, certainties, strict=True):
                self._add(chains[index], token, certainty, drawn=False)
        if processed:
            self._extend_processed([chains[index] for index in processed], take_rows(logits, processed))

    def _extend_processed(self, chains: Sequence[Chain], logits: torch.Tensor) -> None:
        """Adds a token to each chain whose request's parameters matter to the draft."""
        rows = [sampling_row(chain.request, chain.token_ids) for chain in chains]
        logits = self._vocabulary.spread(logits)
        drawn = [index for index, chain in enumerate(chains) if self._is_drawn(chain.request)]
        picked = [index for index in range(len(chains)) if index not in drawn]
        if picked:
            shaped = process_logits(take_rows(logits, picked), [rows[index] for index in picked])
            best, columns = torch.softmax(shaped, dim=-1).max(dim=-1)
            for index, token, certainty in zip(picked, *fetch(columns, best), strict=True):
                self._add(chains[index], token, certainty, drawn=False)
        if drawn:
            # Rounded before it is drawn from: the verifier has to know the very numbers.
            probs = probabilities(take_rows(logits, drawn), [rows[index] for index in drawn]).float()
            tokens_of = draw_drafts(probs, [rows[index] for index in drawn])
            for index, tokens_drawn, row, certainty in zip(
                drawn, tokens_of, probs, probs.amax(dim=-1).tolist(), strict=True
            ):
                if not tokens_drawn:  # the draft's logits were not numbers
                    chains[index].room = len(chains[index].token_ids)
                    continue
                chains[index].probs.append(row)
                self._add(chains[index], tokens_drawn[0], certainty, drawn=True)

    def _add(self, chain: Chain, token: int, certainty: float, *, drawn: bool) -> None:
        """Appends a token with the acceptance of such guesses so far."""
        kind = _Kind(
            min(len(chain.token_ids), _DEEPEST_KEY), bucket_of(certainty), chain.request.params.is_greedy, drawn
        )
        chain.kinds.append(kind)
        chain.token_ids.append(token)
        chain.confidences.append(self._by_kind.estimate(kind, kind.prior))
        chain.survival *= chain.confidences[-1]

    def _is_drawn(self, request: Request) -> bool:
        return self._draws and not request.params.is_greedy

    def _is_processed(self, request: Request) -> bool:
        return self._is_drawn(request) or is_processed(request.params)


def is_processed(params: SamplingParams) -> bool:
    """Whether the parameters change which tokens to guess. Temperature and filters keep the most likely tokens."""
    return params.needs_penalties or bool(params.logit_bias) or params.min_tokens > 0


def likeliest(logits: torch.Tensor, to_target: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[int], list[float]]:
    """The token of each row's highest logit and its probability, which is NaN where a logit is NaN or +inf.

    Args:
        logits: ``[num_rows, num_columns]``
        to_target: maps columns, int64 ``[num_rows]``, to token ids.
    """
    values = logits.float()
    if not is_on_host(values):
        highest, columns = values.max(dim=-1)
        sums = (values - highest.unsqueeze(-1)).exp_().sum(dim=-1)
        token_ids, probabilities = fetch(to_target(columns), sums.reciprocal())
        return token_ids, probabilities
    rows = values.numpy()  # a few rows take numpy a fraction of the time that torch needs
    with np.errstate(invalid="ignore", over="ignore"):
        best = 1.0 / np.exp(rows - rows.max(axis=-1, keepdims=True)).sum(axis=-1)
    return to_target(torch.from_numpy(rows.argmax(axis=-1))).tolist(), best.tolist()
