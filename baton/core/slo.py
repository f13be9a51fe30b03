"""Service-level objectives: SLO classes, how a request gets one, and whether the request met its targets.

An SLO class has two targets. Time to first token (TTFT) counts from the receipt of the request, queueing included;
time per output token (TPOT) is the mean of a sequence after its first token. A sequence meets its class with both.
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
    """TTFT and TPOT targets for one kind of request.

    Attributes:
        ttft_s: longest time to the first token, in seconds.
        tpot_s: longest mean time per output token after the first, in seconds.
        percentile: percentage of requests that should meet both.
        priority: classes with a higher one are more urgent.
        queue_deadline_s: longest wait for admission, in seconds; a request that would wait longer is refused. 0 admits
            at once or refuses.
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


# For text that a user reads as it appears, for answers that a user waits for, and for offline work.
INTERACTIVE = SloClass("interactive", 1.0, 0.05, percentile=95.0, priority=2, queue_deadline_s=0.0)
STANDARD = SloClass("standard", 3.0, 0.1, percentile=95.0, priority=1, queue_deadline_s=300.0)
BATCH = SloClass("batch", 60.0, 0.5, percentile=90.0, priority=0, queue_deadline_s=600.0)
BUILTIN_CLASSES = (INTERACTIVE, STANDARD, BATCH)
BUILTIN_TIERS: Mapping[str, str] = {"flex": BATCH.name, "priority": INTERACTIVE.name}


class SloClasses:
    """The SLO classes of one cluster, and how a request selects one.

    Args:
        default: name of the class for requests that select none.
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

    def become(self, other: SloClasses) -> None:
        """Takes over the classes, the default and the tiers of ``other``."""
        self._by_name, self._default, self._by_tier = other._by_name, other._default, other._by_tier

    @property
    def all(self) -> tuple[SloClass, ...]:
        return tuple(self._by_name.values())

    def choose(self, header: str | None, service_tier: str | None, key_class: str | None = None) -> SloClass:
        """Returns the class named by the header, else by the tier, else by the API key, else the default.

        Args:
            header: value of ``X-Baton-SLO-Class``, the name of a class.
            service_tier: OpenAI's parameter: ``auto`` selects nothing, ``default`` the default class; any other value
                is a configured tier or the name of a class.

        Raises:
            InvalidRequestError: the header or the tier is unknown; the message lists the known ones.
        """
        by_tier = self._of_tier(service_tier)
        if header is not None:
            return self._of_header(header)
        if by_tier is not None:
            return by_tier
        return self._by_name[key_class] if key_class is not None else self._default

    def tier_used(self, slo: SloClass, asked: str) -> str:
        """Value of ``service_tier`` in a response: the tier that served the request, by the name in the request."""
        if self._of_tier(asked) == slo:
            return asked
        if slo == self._default:
            return DEFAULT_TIER
        return next((tier for tier, of_tier in self._by_tier.items() if of_tier == slo), slo.name)

    def _of_header(self, name: str) -> SloClass:
        found = self._by_name.get(name)
        if found is None:
            raise _unknown(f"{SLO_CLASS_HEADER} is not an SLO class", name, self._by_name, SLO_CLASS_HEADER)
        return found

    def _of_tier(self, tier: str | None) -> SloClass | None:
        if tier is None or tier == AUTO_TIER:
            return None
        found = self._default if tier == DEFAULT_TIER else self._by_tier.get(tier) or self._by_name.get(tier)
        if found is None:
            known = dict.fromkeys((AUTO_TIER, DEFAULT_TIER, *self._by_tier, *self._by_name))
            raise _unknown(f"{SERVICE_TIER} is neither a tier nor an SLO class", tier, known, SERVICE_TIER)
        return found


def _unknown(problem: str, given: str, known: Iterable[str], param: str) -> InvalidRequestError:
    names = list(known)
    near = difflib.get_close_matches(given[:60], names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InvalidRequestError(f"{problem}: {given[:60]!r}.{hint} Expected one of {', '.join(names)}.", param=param)


class SloResult(StrEnum):
    """Outcome of a sequence with respect to its class."""

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_BOTH = "missed_both"
    REJECTED = "rejected"
    """Refused because of overload; a miss."""
    FAILED = "failed"
    """Ended by a fault that is not the client's; a miss."""
    EXCLUDED = "excluded"
    """Cancelled by the client, or invalid; not counted."""


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """Result of a sequence, with its margins.

    Attributes:
        ttft_margin_s, tpot_margin_s: target minus measured time, negative for a miss. ``None`` without a measurement:
            for sequences that did not finish, and for the TPOT of a single token.
    """

    result: SloResult
    ttft_margin_s: float | None = None
    tpot_margin_s: float | None = None

    @property
    def is_met(self) -> bool | None:
        """``None`` means that the sequence is not counted."""
        return None if self.result is SloResult.EXCLUDED else self.result is SloResult.MET

    def attributes(self) -> dict[str, str | int | float | bool]:
        """Attributes for the timeline; times are milliseconds."""
        margins = {"slo_ttft_margin_ms": self.ttft_margin_s, "slo_tpot_margin_ms": self.tpot_margin_s}
        shown = {name: round(margin_s * 1e3, 3) for name, margin_s in margins.items() if margin_s is not None}
        return {"slo_result": str(self.result), **shown}


def target_attributes(slo: SloClass) -> dict[str, str | int | float | bool]:
    """Timeline attributes for the class and its targets; times are milliseconds."""
    return {
        "slo_class": slo.name,
        "slo_ttft_target_ms": round(slo.ttft_s * 1e3, 3),
        "slo_tpot_target_ms": round(slo.tpot_s * 1e3, 3),
    }


def judge(slo: SloClass, timeline: Timeline, outcome: str, num_output_tokens: int) -> SloVerdict:
    """Decides whether an ended sequence met the targets of its class.

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
