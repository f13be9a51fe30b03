"""Service-level objectives: classes of requests, which one a request belongs to, and whether it got what was promised.

A class promises two times. Time to first token (TTFT) counts from the receipt of the request, queueing included; time
per output token (TPOT) is the mean of a sequence after its first token. A sequence meets its class with both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.core.errors import InternalError, InvalidRequestError, OverloadedError, error_classes
from baton.core.outcomes import FINISHED, REJECTED
from baton.core.timeline import Timeline

SLO_CLASS_HEADER = "X-Baton-SLO-Class"
SERVICE_TIER = "service_tier"
AUTO_TIER = "auto"
DEFAULT_TIER = "default"


@dataclass(frozen=True, slots=True)
class SloClass:
    """What requests of one kind are promised.

    Attributes:
        ttft_s: longest time to the first token, in seconds.
        tpot_s: longest mean time per output token after the first, in seconds.
        percentile: how many of a hundred requests shall keep both.
        priority: classes with a higher one are more urgent.
        queue_deadline_s: how long a request may wait to be admitted before it is better refused; 0: not at all.
    """

    name: str
    ttft_s: float
    tpot_s: float
    percentile: float
    priority: int
    queue_deadline_s: float

    @property
    def objective(self) -> float:
        """``percentile`` as a share of 1."""
        return self.percentile / 100


# Somebody watches the text appear, faster than they read. / Somebody waits for the answer. / Nobody waits.
INTERACTIVE = SloClass("interactive", 1.0, 0.05, percentile=95.0, priority=2, queue_deadline_s=0.0)
STANDARD = SloClass("standard", 3.0, 0.1, percentile=95.0, priority=1, queue_deadline_s=300.0)
BATCH = SloClass("batch", 60.0, 0.5, percentile=90.0, priority=0, queue_deadline_s=600.0)
BUILTIN_CLASSES = (INTERACTIVE, STANDARD, BATCH)
BUILTIN_TIERS: Mapping[str, str] = {"flex": BATCH.name, "priority": INTERACTIVE.name}


class SloClasses:
    """The classes of one cluster, and how a request chooses among them.

    Args:
        default: name of the class of requests that choose none.
        tiers: value of ``service_tier`` → name of a class.
    """

    def __init__(
        self,
        classes: Iterable[SloClass] = BUILTIN_CLASSES,
        default: str = STANDARD.name,
        tiers: Mapping[str, str] = BUILTIN_TIERS,
    ) -> None:
        self._by_name = {slo.name: slo for slo in classes}
        self._default = self._by_name[default]
        self._by_tier = {tier: self._by_name[name] for tier, name in tiers.items()}

    @property
    def all(self) -> tuple[SloClass, ...]:
        return tuple(self._by_name.values())

    def choose(self, header: str | None, service_tier: str | None, key_class: str | None = None) -> SloClass:
        """The class of a request: that of the header, else of the tier, else of its API key, else the default one.

        Args:
            header: value of ``X-Baton-SLO-Class``, the name of a class.
            service_tier: OpenAI's parameter: ``auto`` chooses nothing, ``default`` the default class; else a configured
                tier or the name of a class.

        Raises:
            InvalidRequestError: the header or the tier names no class; the message lists those that there are.
        """
        by_tier = self._of_tier(service_tier)
        if header is not None:
            return self._of_header(header)
        if by_tier is not None:
            return by_tier
        return self._by_name[key_class] if key_class is not None else self._default

    def tier_used(self, slo: SloClass, asked: str) -> str:
        """What ``service_tier`` of a response says: the tier that served the request, by the name that it asked for."""
        if self._of_tier(asked) == slo:
            return asked
        if slo == self._default:
            return DEFAULT_TIER
        return next((tier for tier, of_tier in self._by_tier.items() if of_tier == slo), slo.name)

    def _of_header(self, name: str) -> SloClass:
        found = self._by_name.get(name)
        if found is None:
            raise _unknown(f"{SLO_CLASS_HEADER} names no SLO class", name, self._by_name, SLO_CLASS_HEADER)
        return found

    def _of_tier(self, tier: str | None) -> SloClass | None:
        if tier is None or tier == AUTO_TIER:
            return None
        found = self._default if tier == DEFAULT_TIER else self._by_tier.get(tier) or self._by_name.get(tier)
        if found is None:
            known = dict.fromkeys((AUTO_TIER, DEFAULT_TIER, *self._by_tier, *self._by_name))
            raise _unknown(f"{SERVICE_TIER} is no tier and no SLO class", tier, known, SERVICE_TIER)
        return found


def _unknown(problem: str, given: str, known: Iterable[str], param: str) -> InvalidRequestError:
    names = list(known)
    near = difflib.get_close_matches(given[:60], names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InvalidRequestError(f"{problem}: {given[:60]!r}.{hint} The known ones are {', '.join(names)}.", param=param)


class SloResult(StrEnum):
    """What became of a sequence, as its class sees it."""

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_BOTH = "missed_both"
    REJECTED = "rejected"
    """Turned away because there was too much work; a miss."""
    FAILED = "failed"
    """Ended by a fault that is not the client's; a miss."""
    EXCLUDED = "excluded"
    """Given up by the client, or wrong in itself; says nothing about the service."""


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """
    Attributes:
        ttft_margin_s, tpot_margin_s: what was left of the target; negative: what it was missed by. None where nothing
            was measured: for sequences that did not finish, and for the time per output token of a single token.
    """

    result: SloResult
    ttft_margin_s: float | None = None
    tpot_margin_s: float | None = None

    @property
    def is_met(self) -> bool | None:
        """None: the sequence does not count."""
        return None if self.result is SloResult.EXCLUDED else self.result is SloResult.MET

    def attributes(self) -> dict[str, str | int | float | bool]:
        """For the timeline; milliseconds."""
        margins = {"slo_ttft_margin_ms": self.ttft_margin_s, "slo_tpot_margin_ms": self.tpot_margin_s}
        shown = {name: round(margin_s * 1e3, 3) for name, margin_s in margins.items() if margin_s is not None}
        return {"slo_result": str(self.result), **shown}


def target_attributes(slo: SloClass) -> dict[str, str | int | float | bool]:
    """What a timeline says of its class; milliseconds."""
    return {
        "slo_class": slo.name,
        "slo_ttft_target_ms": round(slo.ttft_s * 1e3, 3),
        "slo_tpot_target_ms": round(slo.tpot_s * 1e3, 3),
    }


def judge(slo: SloClass, timeline: Timeline, outcome: str, num_output_tokens: int) -> SloVerdict:
    """Whether a sequence that is over kept the targets of its class.

    Args:
        outcome: how it ended, see :mod:`baton.core.outcomes`.
    """
    if outcome not in FINISHED:
        return SloVerdict(_result_without_answer(outcome))
    ttft_ms, tpot_ms = timeline.ttft_ms, timeline.tpot_ms(num_output_tokens)
    ttft_margin_s = None if ttft_ms is None else slo.ttft_s - ttft_ms / 1e3
    tpot_margin_s = None if tpot_ms is None else slo.tpot_s - tpot_ms / 1e3
    late = ttft_margin_s is not None and ttft_margin_s < 0
    slow = tpot_margin_s is not None and tpot_margin_s < 0
    if late:
        result = SloResult.MISSED_BOTH if slow else SloResult.MISSED_TTFT
    else:
        result = SloResult.MISSED_TPOT if slow else SloResult.MET
    return SloVerdict(result, ttft_margin_s, tpot_margin_s)


def _result_without_answer(outcome: str) -> SloResult:
    if outcome in (REJECTED, OverloadedError.code):
        return SloResult.REJECTED
    error = error_classes().get(outcome)
    if error is not None and error.http_status >= InternalError.http_status:
        return SloResult.FAILED
    return SloResult.EXCLUDED
