"""The demand on the cluster: the rate of requests and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.core.slo import SloClass
from cluster.autoscaling import tuning


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Prompts of about one size.

    Attributes:
        share: share of the requests of their class.
        uncached_tokens: mean tokens that a worker has to compute.
        cached_tokens: mean tokens that its prefix cache holds.
    """

    share: float
    uncached_tokens: float
    cached_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """The requests of one SLO class.

    Attributes:
        rate: requests per second.
        prompts: prompts by size; their shares add up to 1.
        output_tokens: mean tokens of an answer.
    """

    slo: SloClass
    rate: float
    prompts: tuple[PromptGroup, ...]
    output_tokens: float

    @property
    def prompt_tokens(self) -> float:
        """Mean prompt tokens, including cached ones."""
        return sum(group.share * (group.uncached_tokens + group.cached_tokens) for group in self.prompts)

    @property
    def uncached_tokens(self) -> float:
        """Mean uncached prompt tokens."""
        return sum(group.share * group.uncached_tokens for group in self.prompts)


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of all SLO classes.

    Attributes:
        num_requests, seen_s: number of observed requests, and time of observation.
        local_share: share of the uncached prompt tokens that decode workers compute themselves.
    """

    classes: tuple[ClassDemand, ...] = ()
    num_requests: int = 0
    local_share: float = 0.0
    seen_s: float = 0.0

    @property
    def present(self) -> list[ClassDemand]:
        """The classes that have requests."""
        return [part for part in self.classes if part.rate > tuning.SMALLEST_RATE]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return sum(part.rate for part in self.present)

    def scaled(self, factor: float) -> Demand:
        """The same mix at ``factor`` times the rate."""
        return replace(self, classes=tuple(replace(part, rate=part.rate * factor) for part in self.classes))

    def with_local_share(self, share: float) -> Demand:
        return replace(self, local_share=share)

    def split(self) -> tuple[Demand, Demand]:
        """Splits into (demand on prefill workers, demand on decode workers). The shortest prompts are local."""
        left = self.local_share * sum(part.rate * part.uncached_tokens for part in self.classes)
        rates: dict[tuple[int, int], float] = {}
        order = sorted(
            (group.uncached_tokens, part_index, index)
            for part_index, part in enumerate(self.classes)
            for index, group in enumerate(part.prompts)
        )
        for uncached, part_index, index in order:
            part = self.classes[part_index]
            rate = part.rate * part.prompts[index].share
            local = min(rate, left / uncached) if uncached else rate * (self.local_share > 0)
            rates[part_index, index] = local
            left -= local * uncached
        away, local_parts = [], []
        for part_index, part in enumerate(self.classes):
            here = [rates[part_index, index] for index in range(len(part.prompts))]
            there = [part.rate * group.share - local for group, local in zip(part.prompts, here, strict=True)]
            away.append(_with_rates(part, there))
            local_parts.append(_with_rates(part, here))
        return replace(self, classes=tuple(away)), replace(self, classes=tuple(local_parts))


def _with_rates(part: ClassDemand, rates: list[float]) -> ClassDemand:
    total = sum(rates)
    if total <= tuning.SMALLEST_RATE:
        return replace(part, rate=0.0)
    groups = (replace(group, share=rate / total) for group, rate in zip(part.prompts, rates, strict=True) if rate > 0)
    return replace(part, rate=total, prompts=tuple(groups))
