"""Traffic over sliding windows: the demand for which pools are sized.

Rates are those of the longest window whose last ten seconds do not differ significantly from the rest. So a change is
seen within seconds, and noise is averaged out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import floor, log2, sqrt
from typing import Any

from baton.core.slo import SloClass
from cluster.autoscaling import tuning
from cluster.autoscaling.demand import ClassDemand, Demand, PromptGroup
from cluster.latency.estimates import USUAL_OUTPUT_TOKENS
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord

_Key = tuple[str, int]
"""(name of the SLO class, size of the prompt in half octaves)."""


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    prompt_tokens: int = 0
    squared_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    local_tokens: int = 0

    def add(self, other: _Sums) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.squared_tokens += other.squared_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.rounds += other.rounds
        self.local_tokens += other.local_tokens


@dataclass(slots=True)
class _Second:
    """The counts of a second, or a part of one, since counts in a snapshot must not change."""

    number: int
    arrived: dict[_Key, _Sums] = field(default_factory=dict)
    ended: dict[_Key, _Sums] = field(default_factory=dict)
    is_seen: bool = False


class TrafficMeter(RequestObserver):
    """Counts requests by class and size per second, for five minutes.

    Refused requests count as well, since the pools should have served them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._classes: dict[str, SloClass] = {}
        self._clock = clock
        self._began_s = clock()
        self._seconds: deque[_Second] = deque()
        self._loads: dict[str, deque[tuple[float, float]]] = {}

    def arrived(self, record: RequestRecord) -> None:
        slo, num_prompt_tokens = record.request.slo, len(record.request.prompt_token_ids)
        self._classes[slo.name] = slo
        sums = self._second().arrived.setdefault((slo.name, _size(num_prompt_tokens)), _Sums())
        sums.add(_Sums(1, num_prompt_tokens, num_prompt_tokens**2))

    def ended(self, record: RequestRecord) -> None:
        num_output = len(record.token_ids)
        if not num_output:
            return  # no tokens, so its cost is unknown
        request = record.request
        num_prompt, num_cached = len(request.prompt_token_ids), record.num_cached_tokens
        sums = self._second().ended.setdefault((request.slo.name, _size(num_prompt)), _Sums())
        local = num_prompt - num_cached if record.was_local else 0
        rounds = max(1, num_output - record.num_accepted)
        sums.add(_Sums(1, num_prompt, 0, num_cached, num_output, rounds, local))

    def sample_load(self, pool: str, load: float) -> None:
        """Adds a sample of a pool's load, as in :class:`PoolObservation`. Must be called every second."""
        self._loads.setdefault(pool, deque(maxlen=tuning.LOAD_SAMPLES)).append((self._clock(), load))

    def load(self, pool: str) -> tuple[float, float]:
        """Returns (mean of the last samples, growth per second, or 0 if it is not significant)."""
        samples = self._loads.get(pool)
        if not samples:
            return 0.0, 0.0
        mean = sum(load for _, load in samples) / len(samples)
        middle_s = sum(at_s for at_s, _ in samples) / len(samples)
        spread = sum((at_s - middle_s) ** 2 for at_s, _ in samples)
        if spread <= 0 or len(samples) < tuning.LOAD_SAMPLES // 3:
            return mean, 0.0
        slope = sum((at_s - middle_s) * load for at_s, load in samples) / spread
        grown = slope * (samples[-1][0] - samples[0][0])
        return mean, slope if abs(grown) > tuning.SIGNIFICANT_GROWTH * sqrt(mean + 1.0) else 0.0

    def seen(self) -> SeenTraffic:
        """A snapshot of all counts, which another thread may read."""
        self._forget()
        if self._seconds:
            self._seconds[-1].is_seen = True
        return SeenTraffic(tuple(self._classes.values()), tuple(self._seconds), self._clock() - self._began_s)

    def _second(self) -> _Second:
        number = int(self._clock() - self._began_s)
        if not self._seconds or self._seconds[-1].number != number or self._seconds[-1].is_seen:
            self._seconds.append(_Second(number))
            self._forget()
        return self._seconds[-1]

    def _forget(self) -> None:
        first = _first(self._clock() - self._began_s, tuning.HISTORY_S)
        while self._seconds and self._seconds[0].number < first:
            self._seconds.popleft()


@dataclass(frozen=True, slots=True)
class SeenTraffic:
    """An immutable snapshot of a meter's counts. Its methods take milliseconds and may run in any thread.

    Attributes:
        classes: SLO classes that had requests.
        age_s: age of the meter.
    """

    classes: tuple[SloClass, ...]
    seconds: tuple[_Second, ...]
    age_s: float

    def joined(self, other: SeenTraffic) -> SeenTraffic:
        """The traffic of two meters that were read at the same time, as if one had seen it all."""
        shift = round(self.age_s - other.age_s)
        theirs = (_Second(second.number + shift, second.arrived, second.ended) for second in other.seconds)
        classes = {slo.name: slo for slo in (*other.classes, *self.classes)}
        seconds = sorted((*self.seconds, *theirs), key=lambda second: second.number)
        return SeenTraffic(tuple(classes.values()), tuple(seconds), max(self.age_s, other.age_s))

    def demand(self) -> Demand:
        """The present demand on the pools."""
        return self._demand(self._window_s(), tuning.RATE_WINDOWS_S[0])

    def mix(self) -> Demand:
        """The mix of all that is known, at the present rate. Few requests of the last minute say little about sizes."""
        whole = self._demand(tuning.HISTORY_S, tuning.HISTORY_S)
        return whole.scaled(self.demand().rate / whole.rate) if whole.rate > 0 else whole

    def _demand(self, window_s: float, answers_s: float) -> Demand:
        """The demand by what arrived in a window. Lengths of answers are those of ``answers_s``, if enough ended."""
        span_s = self._span(window_s)
        arrived, ended = self._arrived(window_s), self._ended(tuning.HISTORY_S)
        recent = self._ended(answers_s)
        classes = []
        for slo in self.classes:
            name = slo.name
            sizes = {size: sums for (of, size), sums in arrived.items() if of == name}
            count = sum(sums.requests for sums in sizes.values())
            if count:
                groups = tuple(_group(sums, count, _cached_share(ended, name, size)) for size, sums in sizes.items())
                classes.append(ClassDemand(slo, count / span_s, groups, _output_tokens(recent, ended, name)))
        total = _total(ended.values())
        uncached = total.prompt_tokens - total.cached_tokens
        local_share = total.local_tokens / uncached if uncached > 0 else 0.0
        num_requests = _total(self._arrived(tuning.HISTORY_S).values()).requests
        return Demand(tuple(classes), num_requests, local_share, self.age_s)

    def summary(self) -> dict[str, Any]:
        """Rates of the last minute; JSON-ready."""
        arrived, ended = _total(self._arrived(60).values()), _total(self._ended(60).values())
        span_s = self._span(60)
        uncached = ended.prompt_tokens - ended.cached_tokens
        return {
            "requests_per_s": round(arrived.requests / span_s, 4),
            "prompt_tokens_per_s": round(arrived.prompt_tokens / span_s, 2),
            "uncached_prompt_tokens_per_s": round(uncached / span_s, 2),
            "output_tokens_per_s": round(ended.output_tokens / span_s, 2),
            "local_prefill_share": round(ended.local_tokens / uncached, 4) if uncached > 0 else None,
            "tokens_per_round": round(ended.output_tokens / ended.rounds, 3) if ended.rounds else None,
        }

    def _span(self, window_s: float) -> float:
        """Seconds that a window covers, at least the shortest window, since the first seconds give no useful rate."""
        return max(tuning.RECENT_S, self.age_s - _first(self.age_s, window_s))

    def _window_s(self) -> int:
        recent_s = self._span(tuning.RECENT_S)
        for window_s in tuning.RATE_WINDOWS_S:
            before_s = self._span(window_s) - recent_s
            if before_s < tuning.RECENT_S / 2:
                continue
            recent, whole = _total(self._arrived(tuning.RECENT_S).values()), _total(self._arrived(window_s).values())
            before = _Sums(whole.requests - recent.requests, whole.prompt_tokens - recent.prompt_tokens,
                           whole.squared_tokens - recent.squared_tokens)  # fmt: skip
            if not _differ(recent, recent_s, before, before_s):
                return window_s
        return tuning.RECENT_S

    def _arrived(self, window_s: float) -> dict[_Key, _Sums]:
        return _merge(second.arrived for second in self._last(window_s))

    def _ended(self, window_s: float) -> dict[_Key, _Sums]:
        return _merge(second.ended for second in self._last(window_s))

    def _last(self, window_s: float) -> list[_Second]:
        first = _first(self.age_s, window_s)
        return [second for second in self.seconds if second.number >= first]


@dataclass(frozen=True, slots=True)
class KnownTraffic:
    """What a router knows of its traffic.

    Attributes:
        num_waiting: requests that wait in the router for room on workers.
    """

    seen: SeenTraffic
    num_waiting: int

    def joined(self, other: KnownTraffic) -> KnownTraffic:
        """The traffic of both routers."""
        return KnownTraffic(self.seen.joined(other.seen), self.num_waiting + other.num_waiting)


def _first(age_s: float, window_s: float) -> int:
    """The number of the first second in a window."""
    return max(0, floor(age_s - window_s))


def _size(num_tokens: int) -> int:
    return int(2 * log2(max(1, num_tokens)))


def _merge(tables: Iterable[dict[_Key, _Sums]]) -> dict[_Key, _Sums]:
    merged: dict[_Key, _Sums] = {}
    for table in tables:
        for key, sums in table.items():
            merged.setdefault(key, _Sums()).add(sums)
    return merged


def _total(parts: Iterable[_Sums]) -> _Sums:
    total = _Sums()
    for sums in parts:
        total.add(sums)
    return total


def _differ(first: _Sums, first_s: float, second: _Sums, second_s: float) -> bool:
    """Whether the rates of requests or prompt tokens in two intervals differ significantly (compound Poisson)."""
    for one, one_squares, other, other_squares in (
        (first.requests, first.requests, second.requests, second.requests),
        (first.prompt_tokens, first.squared_tokens, second.prompt_tokens, second.squared_tokens),
    ):
        sd = sqrt(one_squares / first_s**2 + other_squares / second_s**2)
        if abs(one / first_s - other / second_s) > tuning.SIGNIFICANT_SDS * sd:
            return True
    return False


def _group(sums: _Sums, count: int, cached_share: float) -> PromptGroup:
    mean = sums.prompt_tokens / sums.requests
    cached = min(cached_share * mean, mean - 1.0)  # one token is always computed
    return PromptGroup(sums.requests / count, mean - max(0.0, cached), max(0.0, cached))


def _cached_share(ended: dict[_Key, _Sums], name: str, size: int) -> float:
    """The cached share of prompts of this size, else of this class, else of all."""
    own = ended.get((name, size))
    for sums in (own, _total(part for key, part in ended.items() if key[0] == name), _total(ended.values())):
        if sums is not None and sums.prompt_tokens:
            return sums.cached_tokens / sums.prompt_tokens
    return 0.0


def _output_tokens(recent: dict[_Key, _Sums], ended: dict[_Key, _Sums], name: str) -> float:
    """Mean output tokens of the class in the last minute if enough requests ended, else over all data."""
    newest = _total(part for key, part in recent.items() if key[0] == name)
    if newest.requests >= tuning.ENOUGH_ENDED:
        return newest.output_tokens / newest.requests
    for sums in (_total(part for key, part in ended.items() if key[0] == name), _total(ended.values())):
        if sums.requests:
            return sums.output_tokens / sums.requests
    return USUAL_OUTPUT_TOKENS
