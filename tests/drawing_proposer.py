"""A proposer that samples drafts from a distribution near the target's, like a draft model at temperature > 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.sampling.logits import process_logits
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation.acceptance_rules import draw_drafts


@dataclass(slots=True)
class NextTokenLogits:
    """A model's cached logits after any prefix."""

    model: PreTrainedModel
    _known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def __call__(self, prefix: Sequence[int]) -> torch.Tensor:
        """The logits after a prefix, float32 ``[vocab_size]``."""
        key = tuple(prefix)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self.model(torch.tensor([key])).logits[0, -1].float()
        return self._known[key]


@dataclass(slots=True)
class DrawingProposer:
    """Implements :class:`baton.engine.contracts.Proposer`.

    Attributes:
        logits: the target's logits.
        shape: number of children of each level's first node, beginning at the root; (1, 1) is a chain of two.
        blur: how much the draft's distribution differs from the target's.
    """

    logits: NextTokenLogits
    shape: tuple[int, ...]
    blur: float = 1.0
    results: list[VerifyResult] = field(default_factory=list)

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        return {
            sequence.request.request_id: self._draft(sequence.request, limit)
            for sequence in plan
            if (limit := room.get(sequence.request.request_id, 0))
        }

    def _draft(self, request: Request, limit: int) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        probs: list[torch.Tensor] = []
        parent, path = ROOT, list[int]()
        for num_children in self.shape:
            if len(token_ids) >= limit:
                break
            row = sampling_row(request, path)
            known = [*request.prompt_token_ids, *request.output_token_ids, *path]
            q = torch.softmax(process_logits(self._blurred(known)[None], [row]), dim=-1)
            tokens = draw_drafts(q, [row], num_children)[0]
            children = range(len(token_ids), len(token_ids) + len(tokens))
            token_ids += tokens
            parents += [parent] * len(tokens)
            probs += [q[0]] * len(tokens)
            parent, path = children[0], [*path, tokens[0]]
        is_chain = parents == list(range(-1, len(parents) - 1))
        return Draft(tuple(token_ids), () if is_chain else tuple(parents), probs=torch.stack(probs)).first(limit)

    def _blurred(self, prefix: list[int]) -> torch.Tensor:
        logits = self.logits(prefix)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1000 + prefix[-1]))
        return logits + self.blur * noise

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        """Does nothing: the proposer has no state."""

    def observe(self, result: VerifyResult) -> None:
        self.results.append(result)

    def release(self, request_id: str) -> None:
        """Does nothing: the proposer has no state."""
