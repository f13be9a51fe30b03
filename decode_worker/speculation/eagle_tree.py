"""EAGLE-2's dynamic draft trees: the head goes on where it is surest, and the best of all its guesses are verified.

Li et al., arXiv 2406.16858, section 4; for heads of any version. A tree costs more to make and to verify than a chain,
so that it serves small batches only, where the target's forward is nearly free of charge.

A guess becomes a row of the head when it is expanded. Rows of a tree lie in the order in which they were fed, behind
the rows of the known tokens and in slots that the target will overwrite; each one attends to the known tokens and its
own ancestors only, and its rotary position is that of its depth:

known tokens  t0 … tn-1       rows  (g0,t1) … (gn-2,tn-1)     at places 0 … n-2
1st guesses   a b c           rows  (hn-2,a) (hn-2,b)         at places n-1 n       position n-1, c is not expanded
behind a, b   d e  f g        rows  (ha,d) (hb,f)             at places n+1 n+2     position n
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from baton.core.drafts import ROOT, Draft, ScheduledSequence, depths_of
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import VerifyResult
from baton.engine.device.downloads import fetch
from baton.engine.device.uploads import take_rows
from baton.engine.draft.eagle.feature_state import FeatureState, WaitingRows
from baton.engine.sampling.logits import SamplingRow, process_logits
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation.acceptance import AcceptanceTracker, DepthAcceptance
from decode_worker.speculation.certainty import bucket_of, prior_of
from decode_worker.speculation.chains import VocabularyMap
from decode_worker.speculation.draft_length import DraftPasses, NetworkProposer, Outlook
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.tree import GrowingTree, best_nodes, confidences_of, is_prefix, reindexed, tried

_DEEPEST_KIND = 4
_PRIOR_AT_DEPTH = 0.6
# Drafts that are verified for each of a tree's depths, before any tree was.
_PRIOR_NODES_PER_PASS = 2.0


@dataclass(frozen=True, slots=True)
class EagleTreeSettings:
    """
    Attributes:
        top_k: children of an expanded node, and nodes expanded at a depth.
        max_depth: of the tree, in tokens.
        max_nodes: that are verified.
        max_batch: sequences that get trees; beyond it all of them get chains.
        max_chain: tokens of such a chain.

    Raises:
        ConfigError: a number is below 1.
    """

    top_k: int = 4
    max_depth: int = 6
    max_nodes: int = 32
    max_batch: int = 4
    max_chain: int = 8

    def __post_init__(self) -> None:
        for name in ("top_k", "max_depth", "max_nodes", "max_batch", "max_chain"):
            if getattr(self, name) < 1:
                raise ConfigError(f"An EAGLE tree's {name} must be at least 1, got {getattr(self, name)!r}.")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Guesses that are alike, and so are accepted alike.

    Attributes:
        bucket: of the head's probability of the token.
    """

    depth: int
    bucket: int
    is_greedy: bool

    @classmethod
    def of(cls, depth: int, probability: float, params: SamplingParams) -> _Kind:
        return cls(min(depth, _DEEPEST_KIND), bucket_of(probability), params.is_greedy)

    @property
    def prior(self) -> float:
        return prior_of(self.bucket)


@dataclass(slots=True)
class _Growth:
    """The tree of one request in the making.

    Attributes:
        start: place of the first row of the tree.
        room: nodes to keep in the end.
        kinds: of each node, from which its chance comes.
        chances: of each node, that the target agrees with it, given that it agrees with its parent.
        reach: of each node, the product of the chances along its path.
        beam: nodes to expand next; empty when the tree is done.
        row_of: rows of the nodes that were expanded.
        row_parents: of each row, the row of its parent.
        hidden: ``[len(output_of), hidden_size]``, what the head made of the nodes that it was fed last.
        output_of: their indices in it.
        depth: levels that the tree has.
    """

    rows: WaitingRows
    start: int
    room: int
    hidden: torch.Tensor
    tree: GrowingTree = field(default_factory=GrowingTree)
    kinds: list[_Kind] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    beam: list[int] = field(default_factory=lambda: [ROOT])
    row_of: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})
    row_parents: list[int] = field(default_factory=list)
    output_of: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    depth: int = 0

    @property
    def num_free_slots(self) -> int:
        """Rows may lie at the last known token's place, which no true row has yet, and at those of the room."""
        return self.room + 1 - len(self.row_parents)

    def sampling_rows(self) -> list[SamplingRow]:
        """What is behind each of the beam's nodes."""
        return [sampling_row(self.rows.request, self.tree.path(node)) for node in self.beam]

    def feed(self) -> Span:
        """Makes rows of the beam, and says where they are."""
        start = self.start + len(self.row_parents)
        for node in self.beam:
            self.row_of[node] = len(self.row_parents)
            self.row_parents.append(self.row_of[self.tree.parents[node]])
        return Span(
            self.rows.request.block_ids,
            start,
            len(self.beam),
            parents=tuple(self.row_parents),
            first_key=self.rows.first_key,
        )

    def inputs(self) -> tuple[list[int], torch.Tensor]:
        """Of the beam's rows: tokens, and hidden states ``[len(beam), hidden_size]`` of their parents."""
        parents = [self.output_of[self.tree.parents[node]] for node in self.beam]
        return [self.tree.token_ids[node] for node in self.beam], take_rows(self.hidden, parents)

    def may_be_extended(self, node: int) -> bool:
        """False when even a certain child of the node would not be among the best."""
        if len(self.tree.scores) < self.room:
            return True
        return self.tree.scores[node] > sorted(self.tree.scores, reverse=True)[self.room - 1]

    def draft(self) -> tuple[Draft, list[_Kind]]:
        """The best nodes, likeliest first, and of which kind each one is."""
        kept = best_nodes(self.tree.parents, self.tree.scores, self.room)
        kept_parents = reindexed(self.tree.parents, kept)
        # Nodes of a parent come behind it, since they are never likelier.
        order = sorted(range(len(kept)), key=lambda index: (-self.reach[kept[index]], index))
        place = {ROOT: ROOT} | {index: new for new, index in enumerate(order)}
        parents = tuple(place[kept_parents[index]] for index in order)
        nodes = [kept[index] for index in order]
        is_chain = parents == tuple(range(-1, len(parents) - 1))
        draft = Draft(
            tuple(self.tree.token_ids[node] for node in nodes),
            () if is_chain else parents,
            confidences_of(parents, [self.chances[node] for node in nodes]),
        )
        return draft, [self.kinds[node] for node in nodes]


class EagleTreeProposer(DraftMethod):
    """Implements :class:`~.draft_length.NetworkProposer`: trees for small batches, else what ``chains`` drafts.

    Args:
        state: of the head that guesses.
        passes: says when a further pass of the head no longer pays.
        chains: a proposer over the same state, which it keeps up to date.
        settings: the shape of the trees.
    """

    def __init__(
        self,
        state: FeatureState,
        passes: DraftPasses,
        chains: NetworkProposer,
        settings: EagleTreeSettings | None = None,
    ) -> None:
        self._state = state
        self._head = state.head
        columns = torch.arange(self._head.draft_vocab_size, device=next(self._head.parameters()).device)
        self._vocabulary = VocabularyMap(self._head.to_target_ids(columns), self._head.settings.target.vocab_size)
        self._passes = passes
        self._chains = chains
        self._settings = settings or EagleTreeSettings()
        self._by_kind = AcceptanceTracker()
        self._by_depth = DepthAcceptance(_PRIOR_AT_DEPTH)
        self._shapes = AcceptanceTracker()
        self._drafts: dict[str, tuple[Draft, list[_Kind]]] = {}
        self._uses_trees: bool | None = None

    @torch.inference_mode()
    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts for the sequences whose rows are at hand; the others get theirs a step later."""
        self._drafts = {}
        wanting = [sequence for sequence in plan if sequence.request.request_id in room]
        # Of a step's requests some may not be worth a draft: the others then get what the outlook was for.
        fits = len(wanting) <= self._settings.max_batch
        uses_trees, self._uses_trees = (fits if self._uses_trees is None else fits and self._uses_trees), None
        if not uses_trees:
            return self._chains.propose(plan, self._chain_room(room))
        waiting = [rows for sequence in wanting if (rows := self._rows_at_hand(sequence)) is not None]
        if not waiting:
            return {}
        drafts: dict[str, Draft] = {}
        for growth in self._grow(waiting, room):
            draft, kinds = growth.draft()
            if len(draft):
                request_id = growth.rows.request.request_id
                drafts[request_id] = draft
                self._drafts[request_id] = draft, kinds
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        self._uses_trees = len(requests) <= self._settings.max_batch
        if not self._uses_trees:
            return self._chains.outlook(requests, self._chain_room(room))
        gains = {
            request.request_id: self._by_depth.reach(request, min(self._settings.max_depth, room[request.request_id]))
            for request in requests
        }
        return Outlook(gains, self._shapes.estimate("nodes per pass", _PRIOR_NODES_PER_PASS))

    def computed(self, batch: ForwardBatch, logits: torch.Tensor, results: Mapping[str, VerifyResult]) -> None:
        self._chains.computed(batch, logits, results)

    def observe(self, result: VerifyResult) -> None:
        request = result.sequence.request
        if request.request_id not in self._drafts:
            self._chains.observe(result)
            return
        draft, kinds = self._drafts[request.request_id]
        for level in tried(draft, result.token_ids):
            for node, is_right in level:
                self._by_kind.record(kinds[node], kinds[node].prior, float(is_right))
        if is_prefix(result.sequence.draft, draft):  # what a drafting decision brings is what is verified of it
            verified = result.sequence.draft
            num_depths = 1 + max(depths_of([verified.parent(node) for node in range(len(verified))]))
            num_right = len(result.accepted)
            # Nothing was tried below a right leaf, and where the tree goes deeper elsewhere that is a miss, too.
            self._by_depth.learn(request, num_depths, num_right)
            self._shapes.record("nodes per pass", _PRIOR_NODES_PER_PASS, len(verified) / num_depths)

    def release(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)
        self._by_depth.forget(request_id)
        self._chains.release(request_id)

    def _chain_room(self, room: Mapping[str, int]) -> dict[str, int]:
        return {request_id: min(count, self._settings.max_chain) for request_id, count in room.items()}

    def _rows_at_hand(self, sequence: ScheduledSequence) -> WaitingRows | None:
        """Rows that reach up to the last known token, and not those of a request that has to start again."""
        rows = self._state.waiting(sequence.request.request_id)
        return rows if rows is not None and rows.token_ids and sequence.num_tokens == 1 else None

    def _grow(self, waiting: list[WaitingRows], room: Mapping[str, int]) -> list[_Growth]:
        """Pass by pass, one depth of all trees each."""
        waiting.sort(key=lambda rows: (len(rows.token_ids), -rows.end))
        started_s = time.monotonic()
        hidden, logits = self._state.catch_up(waiting)
        growths = [
            _Growth(
                rows,
                rows.start,
                min(room[rows.request.request_id], self._settings.max_nodes),
                hidden[index : index + 1],
            )
            for index, rows in enumerate(waiting)
        ]
        active = growths
        while True:
            self._expand(active, logits)
            now_s = time.monotonic()
            self._passes.record(len(active), (now_s - started_s) * 1e3)
            started_s = now_s
            active = [growth for growth in active if growth.beam]
            if not active or not self._passes.another([self._next_chance(growth) for growth in active]):
                return growths
            logits = self._pass(active)

    def _pass(self, growths: Sequence[_Growth]) -> torch.Tensor:
        """Feeds all beams to the head; the logits behind their nodes."""
        inputs = [growth.inputs() for growth in growths]
        token_ids = [token for tokens, _ in inputs for token in tokens]
        hidden = torch.cat([own for _, own in inputs])
        fed, logits = self._state.go_on([growth.feed() for growth in growths], token_ids, hidden)
        sizes = [len(growth.beam) for growth in growths]
        for growth, own in zip(growths, torch.split(fed, sizes), strict=True):
            growth.hidden = own
            growth.output_of = {node: index for index, node in enumerate(growth.beam)}
        return logits

    def _expand(self, growths: Sequence[_Growth], logits: torch.Tensor) -> None:
        """Gives the nodes of each beam their likeliest children, and chooses the next beams among these."""
        sizes = [len(growth.beam) for growth in growths]
        found: list[torch.Tensor] = []
        for growth, own in zip(growths, torch.split(logits.float(), sizes), strict=True):
            if _is_processed(growth.rows.request.params):
                shaped = process_logits(self._vocabulary.spread(own), growth.sampling_rows())
                log_probs, token_ids = self._likeliest(shaped)
            else:
                log_probs, columns = self._likeliest(own)
                token_ids = self._vocabulary.to_target(columns)
            found += (token_ids, log_probs)
        levels = fetch(*found)
        for growth, ids, values in zip(growths, levels[::2], levels[1::2], strict=True):
            self._add_level(growth, ids, values)

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities and columns of each row, best first."""
        log_probs, columns = torch.log_softmax(logits, dim=-1).topk(min(self._settings.top_k, logits.shape[-1]), dim=-1)
        return log_probs, columns

    def _add_level(self, growth: _Growth, token_ids: list[list[int]], log_probs: list[list[float]]) -> None:
        """Guesses whose probability is 0 or not a number are left out."""
        tree, params = growth.tree, growth.rows.request.params
        possible = [[math.isfinite(value) for value in row] for row in log_probs]
        children = [list(compress(row, good)) for row, good in zip(token_ids, possible, strict=True)]
        branches = [list(compress(row, good)) for row, good in zip(log_probs, possible, strict=True)]
        depth = growth.depth
        growth.depth += 1
        best = tree.expand(growth.beam, children, branches, self._width(growth))
        for node in range(len(growth.kinds), len(tree.token_ids)):
            kind = _Kind.of(depth, math.exp(tree.log_probs[node]), params)
            chance = self._by_kind.estimate(kind, kind.prior)
            above = 1.0 if tree.parents[node] == ROOT else growth.reach[tree.parents[node]]
            growth.kinds.append(kind)
            growth.chances.append(chance)
            growth.reach.append(chance * above)
        growth.beam = [node for node in best if growth.may_be_extended(node)]

    def _width(self, growth: _Growth) -> int:
        """Nodes to expand next. Where slots are few, they are for depth as much as for width."""
        num_passes = self._settings.max_depth - growth.depth
        if num_passes < 1:
            return 0
        return min(self._settings.top_k, math.ceil(growth.num_free_slots / num_passes))

    def _next_chance(self, growth: _Growth) -> float:
        """Drafts that will be accepted of those that one more pass would add, before it is made."""
        above = min(1.0, sum(growth.reach[node] for node in growth.beam))
        return above * self._by_depth.chance(growth.rows.request, growth.depth)


def _is_processed(params: SamplingParams) -> bool:
    """Whether they change which tokens to guess. Temperature and filters keep the likeliest ones."""
    return params.needs_penalties or bool(params.logit_bias) or params.min_tokens > 0
