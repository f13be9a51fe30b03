"""The token counts of requests with several sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.gateway.openai.responses import Usage
from cluster.gateway.usage import UsageCounter


def spec(*, starts_after: int | None = None, **counts: int) -> Any:
    names = ("completion_tokens", "cached_tokens", "drafted", "accepted", "reasoning_tokens")
    processor = SimpleNamespace(**{f"num_{name}": counts.get(name, 0) for name in names})
    return SimpleNamespace(processor=processor, starts_after=starts_after)


class Watched(list[Any]):
    """Counts how often an entry is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_the_counts_of_all_sequences_are_added_up() -> None:
    specs = [
        spec(completion_tokens=3, cached_tokens=16, drafted=4, accepted=2, reasoning_tokens=1),
        spec(starts_after=0, completion_tokens=5, cached_tokens=32),
    ]
    counter = UsageCounter(20, specs)
    assert counter.usage() == Usage(20)
    counter.note(0)
    assert counter.usage() == Usage(20, 3, 16, 4, 2, 1)
    counter.note(1)
    specs[0].processor.num_completion_tokens = 7
    specs[0].processor.num_accepted = 1
    counter.note(0)
    assert counter.usage() == Usage(20, 12, 16, 4, 1, 1)
    assert counter.usage() == Usage(20, 12, 16, 4, 1, 1)


def test_only_sequences_with_new_output_are_looked_at() -> None:
    specs = Watched(spec(completion_tokens=1) for _ in range(1000))
    counter = UsageCounter(1, specs)
    for index in range(1000):
        counter.note(index)
        counter.usage()
    assert specs.num_reads == 1000
    assert counter.usage().completion_tokens == 1000
