"""EAGLE-2's dynamic draft trees: the head continues where it is surest, and the best of all its guesses are verified.

Li et al., arXiv 2406.16858, section 4; for heads of any version. A tree costs more to make and to verify than a chain,
so trees serve small batches only, in which the target's forward has room to spare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.core.drafts import Draft, depths_of
from baton.core.errors import ConfigError
from baton.core.request import Request
from baton.engine.contracts import VerifyResult
from baton.engine.device.downloads import fetch
from baton.engine.draft.eagle.feature_state import FeatureState, WaitingRows
from baton.engine.sampling.logits import process_logits
from decode_worker.speculation.acceptance import AcceptanceTracker, DepthAcceptance
from decode_worker.speculation.chains import VocabularyMap, is_processed
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.growing_tree import GrowingTree, Kind
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.tree import is_prefix, tried

_PRIOR_AT_DEPTH = 0.6
# Verified drafts per depth of a tree, before any measurement.
_PRIOR_NODES_PER_PASS = 2.0


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """The shape of trees.

    Attributes:
        top_k: children of an expanded node, and nodes expanded at a depth.
        max_depth: maximum depth in tokens.
        max_nodes: maximum number of verified nodes.
        max_batch: largest batch that gets trees; in larger batches all sequences get chains.
        max_chain: maximum number of tokens of these chains.

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


class TreeDrafter:
    """Grows trees pass by pass, and learns their acceptance.

    Args:
        state: state of the head.
        vocabulary: the head's vocabulary.
        passes: decides when a further pass of the head no longer pays.
        settings: the shape of the trees.
    """

    def __init__(
        self, state: FeatureState, vocabulary: VocabularyMap, passes: DraftPasses, settings: TreeSettings
    ) -> None:
        self.settings = settings
        self._state = state
        self._vocabulary = vocabulary
        self._passes = passes
        self._by_kind = AcceptanceTracker()
        self._by_depth = DepthAcceptance(_PRIOR_AT_DEPTH)
        self._shapes = AcceptanceTracker()
        self._drafts: dict[str, tuple[Draft, list[Kind]]] = {}

    def draft(self, waiting: Sequence[WaitingRows], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts by request id.

        Args:
            waiting: for each request, the rows up to its last known token.
        """
        trees = {tree.rows.request.request_id: tree.draft() for tree in self._grow(waiting, room)}
        self._drafts = {request_id: found for request_id, found in trees.items() if len(found[0])}
        return {request_id: draft for request_id, (draft, _) in self._drafts.items()}

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook:
        """The trees' outlook; see :class:`~.method.DraftMethod`."""
        gains = {
            request.request_id: self._by_depth.reach(request, min(self.settings.max_depth, room[request.request_id]))
            for request in requests
        }
        return Outlook(gains, self._shapes.estimate("nodes per pass", _PRIOR_NODES_PER_PASS))

    def observe(self, result: VerifyResult) -> None:
        """Learns from the nodes whose parent is right: the target chose one of them, or none."""
        request = result.sequence.request
        if request.request_id not in self._drafts:
            return
        draft, kinds = self._drafts[request.request_id]
        for level in tried(draft, result.token_ids):
            for node, is_right in level:
                self._by_kind.record(kinds[node], kinds[node].prior, float(is_right))
        if is_prefix(result.sequence.draft, draft):  # the outlook is for the verified part of a draft
            verified = result.sequence.draft
            num_depths = 1 + max(depths_of([verified.parent(node) for node in range(len(verified))]))
            # Nothing was tried below a right leaf, but if the tree is deeper elsewhere, the next depth was missed.
            self._by_depth.learn(request, num_depths, len(result.accepted))
            self._shapes.record("nodes per pass", _PRIOR_NODES_PER_PASS, len(verified) / num_depths)

    def release(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)
        self._by_depth.forget(request_id)

    def _grow(self, waiting: Sequence[WaitingRows], room: Mapping[str, int]) -> list[GrowingTree]:
        """Grows all trees by one depth per pass."""
        started_s = time.monotonic()
        hidden, logits = self._state.catch_up(waiting)
        trees = [
            GrowingTree(rows, min(room[rows.request.request_id], self.settings.max_nodes), hidden[index : index + 1])
            for index, rows in enumerate(waiting)
        ]
        active = trees
        while True:
            self._expand(active, logits)
            now_s = time.monotonic()
            self._passes.record(len(active), (now_s - started_s) * 1e3)
            started_s = now_s
            active = [tree for tree in active if tree.beam]
            if not active or not self._passes.another([self._next_chance(tree) for tree in active]):
                return trees
            logits = self._pass(active)

    def _pass(self, trees: Sequence[GrowingTree]) -> torch.Tensor:
        """Feeds all beams to the head; returns the logits after their nodes."""
        inputs = [tree.inputs() for tree in trees]
        token_ids = [token for tokens, _ in inputs for token in tokens]
        hidden = torch.cat([own for _, own in inputs])
        fed, logits = self._state.go_on([tree.feed() for tree in trees], token_ids, hidden)
        for tree, own in zip(trees, torch.split(fed, [len(tree.beam) for tree in trees]), strict=True):
            tree.fed(own)
        return logits

    def _expand(self, trees: Sequence[GrowingTree], logits: torch.Tensor) -> None:
        """Gives the nodes of each beam their likeliest children."""
        sizes = [len(tree.beam) for tree in trees]
        found: list[torch.Tensor] = []
        for tree, own in zip(trees, torch.split(logits.float(), sizes), strict=True):
            if is_processed(tree.rows.request.params):
                shaped = process_logits(self._vocabulary.spread(own), tree.sampling_rows())
                log_probs, token_ids = self._likeliest(shaped)
            else:
                log_probs, columns = self._likeliest(own)
                token_ids = self._vocabulary.to_target(columns)
            found += (token_ids, log_probs)
        levels = fetch(*found)
        for tree, ids, values in zip(trees, levels[::2], levels[1::2], strict=True):
            tree.expand(ids, values, self._chance_of, self._width(tree))

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities and columns of each row, best first."""
        log_probs, columns = torch.log_softmax(logits, dim=-1).topk(min(self.settings.top_k, logits.shape[-1]), dim=-1)
        return log_probs, columns

    def _chance_of(self, kind: Kind) -> float:
        return self._by_kind.estimate(kind, kind.prior)

    def _width(self, tree: GrowingTree) -> int:
        """The number of nodes to expand after the next level. Few slots are divided between depth and width."""
        num_passes = self.settings.max_depth - tree.depth - 1
        if num_passes < 1:
            return 0
        return min(self.settings.top_k, math.ceil(tree.num_free_slots / num_passes))

    def _next_chance(self, tree: GrowingTree) -> float:
        """Expected accepted drafts among those that one more pass would add."""
        above = min(1.0, sum(tree.reach[node] for node in tree.beam))
        return above * self._by_depth.chance(tree.rows.request, tree.depth)
