"""A language of a few tokens whose next-token distributions are tables, and its drafts, for exact calculations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from baton.core.drafts import NO_DRAFT, ROOT, Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams, TokenLogprobs
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Verifier
from baton.engine.sampling.logits import process_logits
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation.acceptance_rules import draw_drafts
from decode_worker.speculation.verification import sampling_rows

PROMPT = (0, 1)

Drafter = Callable[[Request], Draft]


@dataclass(slots=True, eq=False)
class Table:
    """Random logits for every prefix."""

    vocab_size: int
    seed: int
    spread: float = 1.0
    _known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """The logits after a prefix, float32 ``[vocab_size]``."""
        key = tuple(prefix)
        if key not in self._known:
            chance = random.Random(f"{self.seed} {key}")
            self._known[key] = torch.tensor([chance.gauss(0, self.spread) for _ in range(self.vocab_size)])
        return self._known[key]


def known_tokens(request: Request) -> list[int]:
    return [*request.prompt_token_ids, *request.output_token_ids]


def no_drafter(request: Request) -> Draft:
    return NO_DRAFT


@dataclass(frozen=True, slots=True)
class ToyDrafter:
    """Drafts by its own table.

    Attributes:
        shape: number of children of the nodes of each depth, beginning at the root; (1, 1) is a chain of two.
        drawn: whether the draft samples its tokens, or takes the likeliest ones.
        processed: whether it applies the request's sampling parameters; else it also drafts impossible tokens.
        bushy: whether all nodes get children, or only the first node of each level.
    """

    table: Table
    shape: tuple[int, ...]
    drawn: bool = True
    processed: bool = True
    bushy: bool = False

    def __call__(self, request: Request) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        probs: list[torch.Tensor] = []
        level: list[tuple[int, list[int]]] = [(ROOT, [])]
        # The last token of the answer is never drafted.
        for num_children in self.shape[: request.params.max_tokens - len(request.output_token_ids) - 1]:
            following: list[tuple[int, list[int]]] = []
            for parent, path in level:
                row = sampling_row(request, path)
                logits = self.table.logits([*known_tokens(request), *path])[None]
                q = torch.softmax(process_logits(logits, [row]) if self.processed else logits, dim=-1)
                if self.drawn:
                    tokens = draw_drafts(q, [row], num_children)[0]
                else:
                    tokens = q[0].topk(num_children).indices.tolist()
                for token in tokens:
                    following.append((len(token_ids), [*path, token]))
                    token_ids.append(token)
                    parents.append(parent)
                    probs.append(q[0])
            level = following if self.bushy else following[:1]
        if not token_ids:
            return NO_DRAFT
        is_chain = parents == list(range(-1, len(parents) - 1))
        return Draft(
            tuple(token_ids), () if is_chain else tuple(parents), probs=torch.stack(probs) if self.drawn else None
        )


def batch_of(sequences: Sequence[ScheduledSequence]) -> ForwardBatch:
    """A batch with only the fields that a verifier reads."""
    nothing = torch.empty(0, dtype=torch.int64)
    rows_of: list[range] = []
    for sequence in sequences:
        start = rows_of[-1].stop if rows_of else 0
        rows_of.append(range(start, start + len(sequence.draft) + 1))
    return ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        logit_rows=nothing,
        groups=[],
        sequences=list(sequences),
        starts=[],
        rows_of=rows_of,
        host_ints=nothing.numpy(),
    )


def logits_of(table: Table, sequence: ScheduledSequence) -> torch.Tensor:
    """The logits of a sequence's rows, ``[len(draft) + 1, vocab_size]``."""
    draft = sequence.draft
    paths = [[], *([draft.token_ids[index] for index in draft.path(node)] for node in range(len(draft)))]
    return torch.stack([table.logits([*known_tokens(sequence.request), *path]) for path in paths])


def generate(
    table: Table, verifier: Verifier, drafter: Drafter, params: SamplingParams
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """Runs a whole request in rounds; returns its tokens, and their log probabilities if requested."""
    request = Request("toy", list(PROMPT), params)
    logprobs: list[TokenLogprobs] = []
    while True:
        request.num_computed_tokens = request.num_tokens - 1
        sequence = ScheduledSequence(request, 1, drafter(request))
        [result] = verifier.verify(batch_of([sequence]), logits_of(table, sequence))
        logprobs += result.logprobs or ()
        for token in result.token_ids:
            if request.append_output(token) is not None:
                tokens = tuple(request.output_token_ids)
                return tokens, tuple(logprobs[: len(tokens)])


def behind_each_row(sequence: ScheduledSequence) -> list[list[int]]:
    """The output tokens before each row's choice, as the verifier sees them."""
    return [list(row.output_token_ids) for row in sampling_rows(sequence)]
