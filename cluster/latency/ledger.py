"""The ledger of work in progress on each worker, which gives the queue ahead of the next request.

Sums are updated as requests come and go, so the time of a routing decision does not grow with the number of open
streams.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from cluster.latency.cost_table import attention_pairs
from cluster.latency.estimates import EMPTY_QUEUE, PromptQueue


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt in progress.

    Attributes:
        rank: sort key: the queue priority while no prompt is late, then the order of sending.
    """

    uncached_tokens: int
    attention_pairs: int
    sent_s: float
    queue_priority: QueuePriority
    rank: tuple[float, float, float]


@dataclass(slots=True)
class _Prompts:
    """The prompts of one worker, in the order of sending, and when the last one left."""

    waiting: dict[str, _Prompt] = field(default_factory=dict)
    by_rank: list[_Prompt] = field(default_factory=list)
    progress_s: float = -inf
    tokens: int = 0
    attention_pairs: int = 0
    num_sent: int = 0

    def add(self, name: str, uncached_tokens: int, pairs: int, now_s: float, queue_priority: QueuePriority) -> None:
        self.num_sent += 1
        prompt = _Prompt(uncached_tokens, pairs, now_s, queue_priority, (*queue_priority.key(-inf), self.num_sent))
        self.waiting[name] = prompt
        insort(self.by_rank, prompt, key=_rank)
        self.tokens += uncached_tokens
        self.attention_pairs += pairs

    def remove(self, name: str) -> None:
        prompt = self.waiting.pop(name)
        del self.by_rank[bisect_left(self.by_rank, prompt.rank, key=_rank)]
        self.tokens -= prompt.uncached_tokens
        self.attention_pairs -= prompt.attention_pairs

    def behind(self, key: tuple[float, float], now_s: float) -> Iterator[_Prompt]:
        """The prompts that go after this key. Lateness only moves prompts forwards."""
        for index in range(bisect_right(self.by_rank, (*key, inf), key=_rank), len(self.by_rank)):
            prompt = self.by_rank[index]
            if prompt.queue_priority.key(now_s) > key:
                yield prompt


def _rank(prompt: _Prompt) -> tuple[float, float, float]:
    return prompt.rank


@dataclass(slots=True)
class _Sequences:
    """The sequences that decode on one worker: tokens of each and in total, now and expected at the end, and the number
    of sequences by TPOT target."""

    tokens: dict[str, int] = field(default_factory=dict)
    context_tokens: int = 0
    final: dict[str, int] = field(default_factory=dict)
    final_tokens: int = 0
    targets: dict[str, float] = field(default_factory=dict)
    num_with_target: Counter[float] = field(default_factory=Counter)


class WorkLedger:
    """Requests in progress, by worker. The ids of sequences in progress are unique."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompts] = {}
        self._decoding: dict[str, _Sequences] = {}

    def begin_prompt(
        self,
        worker_id: str,
        name: str,
        uncached_tokens: int,
        cached_tokens: int,
        now_s: float,
        queue_priority: QueuePriority = NO_PRIORITY,
    ) -> None:
        """Adds a prompt that was sent to a worker."""
        prompts = self._prompts.setdefault(worker_id, _Prompts())
        pairs = attention_pairs(uncached_tokens, cached_tokens)
        prompts.add(name, uncached_tokens, pairs, now_s, queue_priority)

    def end_prompt(self, worker_id: str, name: str, now_s: float, *, is_computed: bool = True) -> None:
        """Removes a prompt, whose first token came or which was given up. Idempotent.

        Args:
            is_computed: False if it was given up. Then the progress of another prompt in progress is not reset.
        """
        prompts = self._prompts.get(worker_id)
        if prompts is None or name not in prompts.waiting:
            return
        if is_computed or name == next(iter(prompts.waiting)):
            prompts.progress_s = now_s
        prompts.remove(name)
        if not prompts.waiting:
            del self._prompts[worker_id]

    def begin_decoding(
        self, worker_id: str, name: str, num_tokens: int, tpot_target_s: float = inf, expected_tokens: int = 0
    ) -> None:
        """Adds a sequence that decodes on a worker, or will do so as soon as its prompt is computed.

        Args:
            num_tokens: present tokens of the sequence, including its prompt; :meth:`grow` adds to them.
            expected_tokens: number of tokens expected to be added.
        """
        sequences = self._decoding.setdefault(worker_id, _Sequences())
        sequences.tokens[name] = num_tokens
        sequences.context_tokens += num_tokens
        sequences.final[name] = num_tokens + expected_tokens
        sequences.final_tokens += num_tokens + expected_tokens
        sequences.targets[name] = tpot_target_s
        sequences.num_with_target[tpot_target_s] += 1

    def grow(self, worker_id: str, name: str, num_tokens: int) -> None:
        """Adds new tokens of a sequence."""
        sequences = self._decoding.get(worker_id)
        if sequences is not None and name in sequences.tokens:
            sequences.tokens[name] += num_tokens
            sequences.context_tokens += num_tokens
            beyond = max(0, sequences.tokens[name] - sequences.final[name])
            sequences.final[name] += beyond
            sequences.final_tokens += beyond

    def end_decoding(self, worker_id: str, name: str) -> None:
        sequences = self._decoding.get(worker_id)
        if sequences is None or name not in sequences.tokens:
            return
        sequences.context_tokens -= sequences.tokens.pop(name)
        sequences.final_tokens -= sequences.final.pop(name)
        target = sequences.targets.pop(name)
        sequences.num_with_target[target] -= 1
        if not sequences.num_with_target[target]:
            del sequences.num_with_target[target]
        if not sequences.tokens:
            del self._decoding[worker_id]

    def queue(
        self, worker_id: str, now_s: float, queue_priority: QueuePriority | None = NO_PRIORITY, chunk_tokens: int = 512
    ) -> PromptQueue:
        """The work ahead of a new prompt: the step in progress, and all prompts that go before it.

        Among equals, the prompt that was sent first goes first.

        Args:
            queue_priority: ``None`` means that the worker serves in order of arrival, so all its prompts go before.
            chunk_tokens: tokens that a prompt in progress of lower priority still computes before it gives way.
        """
        batch, context = self.batch(worker_id)
        strictest_s = self.tpot_target_s(worker_id)
        target_s = strictest_s if strictest_s < inf else 0.0
        prompts = self._prompts.get(worker_id)
        if prompts is None:
            return PromptQueue(decoding=batch, context_tokens=context, tpot_target_s=target_s) if batch else EMPTY_QUEUE
        tokens, pairs, count, head = _ahead(prompts, now_s, queue_priority, chunk_tokens)
        # A head that gives way counts with its next chunk only, so its elapsed time shortens nothing.
        gives_way = queue_priority is not None and head.queue_priority.key(now_s) > queue_priority.key(now_s)
        elapsed_s = 0.0 if gives_way else max(0.0, now_s - max(head.sent_s, prompts.progress_s))
        return PromptQueue(
            tokens=tokens,
            attention_pairs=pairs,
            prompts=count,
            elapsed_ms=elapsed_s * 1e3,
            decoding=batch,
            context_tokens=context,
            tpot_target_s=target_s,
        )

    def backlog_tokens(self, worker_id: str) -> int:
        """Uncached tokens of all prompts that the worker still has to compute."""
        prompts = self._prompts.get(worker_id)
        return prompts.tokens if prompts is not None else 0

    def num_prompts(self, worker_id: str) -> int:
        """The number of prompts that the worker still has to compute, of any queue priority."""
        prompts = self._prompts.get(worker_id)
        return len(prompts.waiting) if prompts is not None else 0

    def computes_prompts(self, worker_id: str) -> bool:
        """Whether the worker has prompts to compute."""
        return worker_id in self._prompts

    def batch(self, worker_id: str) -> tuple[int, int]:
        """Returns (sequences that decode on the worker or will do so, tokens of all of them together)."""
        sequences = self._decoding.get(worker_id)
        return (len(sequences.tokens), sequences.context_tokens) if sequences is not None else (0, 0)

    def final_tokens(self, worker_id: str) -> int:
        """Expected tokens at the end of all sequences that decode on the worker, together."""
        sequences = self._decoding.get(worker_id)
        return sequences.final_tokens if sequences is not None else 0

    def tpot_target_s(self, worker_id: str) -> float:
        """The strictest TPOT target of the sequences that decode on the worker; infinity if there are none."""
        sequences = self._decoding.get(worker_id)
        return min(sequences.num_with_target) if sequences is not None else inf


def _ahead(
    prompts: _Prompts, now_s: float, queue_priority: QueuePriority | None, chunk_tokens: int
) -> tuple[int, int, int, _Prompt]:
    """Returns (tokens, attention pairs, prompts, prompt in progress) of the work ahead of a queue priority."""
    head = next(iter(prompts.waiting.values()))
    tokens, pairs, count = prompts.tokens, prompts.attention_pairs, len(prompts.waiting)
    if queue_priority is None:
        return tokens, pairs, count, head
    for prompt in prompts.behind(queue_priority.key(now_s), now_s):
        if prompt is head:
            share = min(1.0, chunk_tokens / max(1, prompt.uncached_tokens))
            tokens -= prompt.uncached_tokens - int(share * prompt.uncached_tokens)
            pairs -= prompt.attention_pairs - int(share * prompt.attention_pairs)
        else:
            tokens -= prompt.uncached_tokens
            pairs -= prompt.attention_pairs
            count -= 1
    return tokens, pairs, count, head
