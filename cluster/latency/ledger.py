"""What the router has given to each worker and not got back: the queue that the next request would find there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.latency.estimates import EMPTY_QUEUE, PromptQueue, attention_pairs


@dataclass(frozen=True, slots=True)
class _Prompt:
    uncached_tokens: int
    attention_pairs: int
    sent_s: float


@dataclass(slots=True)
class _Prompts:
    """Of one worker, in the order in which they were sent, and when the last one left."""

    waiting: dict[str, _Prompt]
    progress_s: float = float("-inf")


class WorkLedger:
    """Requests under way, by worker. Sequences are named by ids that are unique while they are under way."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompts] = {}
        self._decoding: dict[str, dict[str, Callable[[], int]]] = {}

    def begin_prompt(self, worker_id: str, name: str, uncached_tokens: int, cached_tokens: int, now_s: float) -> None:
        """A prompt was sent to a worker."""
        prompts = self._prompts.setdefault(worker_id, _Prompts({}))
        pairs = attention_pairs(uncached_tokens, cached_tokens)
        prompts.waiting[name] = _Prompt(uncached_tokens, pairs, now_s)

    def end_prompt(self, worker_id: str, name: str, now_s: float) -> None:
        """Its first token came, or it never will."""
        prompts = self._prompts.get(worker_id)
        if prompts is not None and prompts.waiting.pop(name, None) is not None:
            prompts.progress_s = now_s
            if not prompts.waiting:
                del self._prompts[worker_id]

    def begin_decoding(self, worker_id: str, name: str, num_tokens: Callable[[], int]) -> None:
        """A sequence decodes on a worker, or will as soon as its prompt is computed.

        Args:
            num_tokens: of the sequence at present, its prompt included.
        """
        self._decoding.setdefault(worker_id, {})[name] = num_tokens

    def end_decoding(self, worker_id: str, name: str) -> None:
        sequences = self._decoding.get(worker_id)
        if sequences is not None:
            sequences.pop(name, None)
            if not sequences:
                del self._decoding[worker_id]

    def queue(self, worker_id: str, now_s: float) -> PromptQueue:
        """What a new prompt would find in front of it."""
        batch, context = self.batch(worker_id)
        prompts = self._prompts.get(worker_id)
        if prompts is None:
            return PromptQueue(decoding=batch, context_tokens=context) if batch else EMPTY_QUEUE
        waiting = prompts.waiting.values()
        head = next(iter(waiting))
        return PromptQueue(
            tokens=sum(prompt.uncached_tokens for prompt in waiting),
            attention_pairs=sum(prompt.attention_pairs for prompt in waiting),
            prompts=len(waiting),
            elapsed_ms=max(0.0, now_s - max(head.sent_s, prompts.progress_s)) * 1e3,
            decoding=batch,
            context_tokens=context,
        )

    def computes_prompts(self, worker_id: str) -> bool:
        """Whether the worker has prompts to compute."""
        return worker_id in self._prompts

    def decodes(self, worker_id: str) -> bool:
        """Whether sequences decode on the worker, or will."""
        return worker_id in self._decoding

    def batch(self, worker_id: str) -> tuple[int, int]:
        """(sequences that decode there or will, tokens of all of them together)."""
        sequences = self._decoding.get(worker_id)
        return (len(sequences), sum(count() for count in sequences.values())) if sequences else (0, 0)
