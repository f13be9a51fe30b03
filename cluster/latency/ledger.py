"""The work in progress on each worker: the queue that the next request would find there.

Sums are kept as requests come and go: a routing decision asks every worker, thousands of streams may be open, and the
answer must not take longer for them.
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
    """
    Attributes:
        rank: sorts prompts by their queue priority while none is late, then in the order of sending.
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
        """The prompts that go behind this key. Lateness moves prompts forwards only."""
        for index in range(bisect_right(self.by_rank, (*key, inf), key=_rank), len(self.by_rank)):
            prompt = self.by_rank[index]
            if prompt.queue_priority.key(now_s) > key:
                yield prompt


def _rank(prompt: _Prompt) -> tuple[float, float, float]:
    return prompt.rank


@dataclass(slots=True)
class _Sequences:
    """That decode on one worker: tokens of each and of all, the same as expected in the end, and how many have which
    target."""

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
        """A prompt was sent to a worker."""
        prompts = self._prompts.setdefault(worker_id, _Prompts())
        pairs = attention_pairs(uncached_tokens, cached_tokens)
        prompts.add(name, uncached_tokens, pairs, now_s, queue_priority)

    def end_prompt(self, worker_id: str, name: str, now_s: float, *, is_computed: bool = True) -> None:
        """Its first token came, or it never will.

        Args:
            is_computed: False: it was given up. The one at work has been so for as long as before, if it is another.
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
        """A sequence decodes on a worker, or will as soon as its prompt is computed.

        Args:
            num_tokens: of the sequence at present, its prompt included; :meth:`grow` adds to them.
            expected_tokens: that will be added.
        """
        sequences = self._decoding.setdefault(worker_id, _Sequences())
        sequences.tokens[name] = num_tokens
        sequences.context_tokens += num_tokens
        sequences.final[name] = num_tokens + expected_tokens
        sequences.final_tokens += num_tokens + expected_tokens
        sequences.targets[name] = tpot_target_s
        sequences.num_with_target[tpot_target_s] += 1

    def grow(self, worker_id: str, name: str, num_tokens: int) -> None:
        """A sequence has got more tokens."""
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
        """The work in front of a new prompt: the step in progress, and all prompts that go before it.

        Among equals, the prompt that was sent first goes first.

        Args:
            queue_priority: ``None`` if the worker serves in order of arrival, so that all its prompts go before.
            chunk_tokens: of a prompt that is at work but does not go before, so many are computed before it gives way.
        """
        batch, context = self.batch(worker_id)
        strictest_s = self.tpot_target_s(worker_id)
        target_s = strictest_s if strictest_s < inf else 0.0
        prompts = self._prompts.get(worker_id)
        if prompts is None:
            return PromptQueue(decoding=batch, context_tokens=context, tpot_target_s=target_s) if batch else EMPTY_QUEUE
        tokens, pairs, count, head = _ahead(prompts, now_s, queue_priority, chunk_tokens)
        # Of a head that gives way only its next chunk is counted: what it has had before takes nothing off the others.
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
        """Uncached tokens of all prompts that the worker has still to compute."""
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
        """(sequences that decode there or will, tokens of all of them together)."""
        sequences = self._decoding.get(worker_id)
        return (len(sequences.tokens), sequences.context_tokens) if sequences is not None else (0, 0)

    def final_tokens(self, worker_id: str) -> int:
        """Tokens that the sequences which decode there are expected to have in the end, all together."""
        sequences = self._decoding.get(worker_id)
        return sequences.final_tokens if sequences is not None else 0

    def tpot_target_s(self, worker_id: str) -> float:
        """The strictest target of those that decode on the worker; infinity without any."""
        sequences = self._decoding.get(worker_id)
        return min(sequences.num_with_target) if sequences is not None else inf


def _ahead(
    prompts: _Prompts, now_s: float, queue_priority: QueuePriority | None, chunk_tokens: int
) -> tuple[int, int, int, _Prompt]:
    """(tokens, attention pairs, prompts, the prompt at work) of what a prompt of that queue priority would wait for."""
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
