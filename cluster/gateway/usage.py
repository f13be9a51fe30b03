"""The token counts of a request while its sequences run."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.gateway.openai.responses import Usage
from cluster.gateway.sequence_runner import SequenceSpec

_NOTHING = (0, 0, 0, 0, 0)


class UsageCounter:
    """Adds up the tokens of a request's sequences. The cost per output does not grow with the number of sequences."""

    def __init__(self, num_prompt_tokens: int, specs: Sequence[SequenceSpec]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._specs = specs
        self._changed: set[int] = set()
        self._counted: dict[int, tuple[int, ...]] = {}
        self._totals: tuple[int, ...] = _NOTHING

    def note(self, index: int) -> None:
        """There is new output of the sequence ``index``."""
        self._changed.add(index)

    def usage(self) -> Usage:
        """The counts of all output that was noted."""
        for index in self._changed:
            before, now = self._counted.get(index, _NOTHING), _counts_of(self._specs[index])
            self._counted[index] = now
            self._totals = tuple(map(_moved, self._totals, before, now))
        self._changed.clear()
        return Usage(self._num_prompt_tokens, *self._totals)


def _moved(total: int, before: int, now: int) -> int:
    return total + now - before


def _counts_of(spec: SequenceSpec) -> tuple[int, ...]:
    """Completion, cached, drafted, accepted and reasoning tokens."""
    processor = spec.processor
    # Further choices always find the prompt in the cache; only the first one shows what the client saved.
    num_cached = processor.num_cached_tokens if spec.starts_after is None else 0
    return (
        processor.num_completion_tokens,
        num_cached,
        processor.num_drafted,
        processor.num_accepted,
        processor.num_reasoning_tokens,
    )
