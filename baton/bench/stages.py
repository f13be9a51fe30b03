"""The load of a run: its stages, and the due times of requests in open loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.core.option_text import check_not_negative, check_positive, known_name

POISSON = "poisson"
BURSTY = "bursty"
CONSTANT = "constant"
TRACE = "trace"
ARRIVALS = (POISSON, BURSTY, CONSTANT, TRACE)

_Gaps = Callable[[np.random.Generator, float, float, int], NDArray[np.float64]]


def intended_times(
    process: str, rate: float, count: int, rng: np.random.Generator, burstiness: float = 1.0
) -> list[float]:
    """Seconds from the start of the load to each of ``count`` requests, ascending.

    Args:
        process: ``poisson``, ``bursty`` or ``constant``.
        rate: requests/s on average, over 0.
        burstiness: shape of the Gamma distribution of the gaps, for ``bursty``. 1 is Poisson. Smaller values increase
            the variance of the gaps, larger values make them equal.

    Raises:
        ConfigError: the process is none of these, or a number is not over 0.
    """
    gaps_of = _GAPS[known_name("--arrival", process, _GAPS)]
    if rate <= 0 or burstiness <= 0:
        raise ConfigError(f"--rate and --burstiness must be above 0; got {rate:g} and {burstiness:g}.")
    gaps = gaps_of(rng, rate, burstiness, count)
    return [float(moment) for moment in np.cumsum(gaps)]


def replayed_times(at_s: Sequence[float], speed_up: float) -> list[float]:
    """The times of a trace, divided by ``speed_up``.

    Raises:
        ConfigError: ``speed_up`` is not over 0.
    """
    if speed_up <= 0:
        raise ConfigError(f"--speed-up must be above 0; got {speed_up:g}.")
    return [moment / speed_up for moment in at_s]


def _poisson_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return rng.exponential(1.0 / rate, count)


def _bursty_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return rng.gamma(burstiness, 1.0 / (rate * burstiness), count)


def _constant_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return np.full(count, 1.0 / rate)


_GAPS: Mapping[str, _Gaps] = {POISSON: _poisson_gaps, BURSTY: _bursty_gaps, CONSTANT: _constant_gaps}


CLOSED = "closed"
DEFAULT_REQUESTS = 1000
DEFAULT_SECONDS = 60.0
DEFAULT_TRACE_SECONDS = 3600.0
MAX_RATE = 1e6
"""Largest rate in requests/s, beyond any client, to bound the memory of the schedule."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The end of a stage, by count or by time, whichever comes first.

    Attributes:
        requests: largest number of requests, without those of the warm-up.
        seconds: duration of sending after the warm-up.
        warmup_requests: number of first requests that are left out of the statistics.
        warmup_s: requests sent in these first seconds are left out too.
        grace_s: time to wait for answers after the last request. Unfinished requests then count as failed.
    """

    requests: int = DEFAULT_REQUESTS
    seconds: float = DEFAULT_SECONDS
    warmup_requests: int = 0
    warmup_s: float = 0.0
    grace_s: float = 60.0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"--requests must be at least 1; got {self.requests}.")
        check_positive("--duration", self.seconds)
        if self.warmup_requests < 0:
            raise ConfigError(f"--warmup-requests must be at least 0; got {self.warmup_requests}.")
        check_not_negative("--warmup", self.warmup_s)
        check_not_negative("--grace", self.grace_s)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run.

    Attributes:
        index: position among the stages of a run.
        arrival: ``closed`` for a closed loop, in which each of ``concurrency`` clients sends its next request after
            its answer; else the arrival process of an open loop.
        concurrency: clients of a closed loop; 0 in an open loop.
        rate: mean arrivals/s of an open loop; 0 with a trace and in a closed loop.
        burstiness: as in :func:`baton.bench.stages.intended_times`.
        speed_up: factor of the trace's clock.
        max_inflight: in an open loop, requests beyond it wait, which counts as latency. ``None`` means no limit.
    """

    index: int
    bounds: Bounds
    arrival: str = CLOSED
    concurrency: int = 0
    rate: float = 0.0
    burstiness: float = 1.0
    speed_up: float = 1.0
    max_inflight: int | None = None

    @property
    def is_open(self) -> bool:
        return self.arrival != CLOSED

    @property
    def label(self) -> str:
        """Name of the stage in tables. Stages of two reports are matched by it."""
        if not self.is_open:
            return f"{self.concurrency} at once"
        return f"trace x {self.speed_up:g}" if self.arrival == TRACE else f"{self.rate:g}/s {self.arrival}"


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The requested load, from which :func:`plan_stages` makes stages.

    Attributes:
        concurrency: number of clients of each closed-loop stage.
        rate: rate of each open-loop stage, in requests/s.
        arrival: arrival process of open loops; ``None`` means Poisson.
        requests, duration_s: bounds of each stage; ``None`` means the defaults.
        warmup_requests: ``None`` means one per client in closed loops, and none in open loops.
    """

    concurrency: Sequence[int] = ()
    rate: Sequence[float] = ()
    arrival: str | None = None
    burstiness: float = 1.0
    speed_up: float = 1.0
    max_inflight: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int | None = None
    warmup_s: float = 0.0
    grace_s: float = 60.0


def plan_stages(settings: LoadSettings, trace_length: int | None) -> list[Stage]:
    """The stages in order. Without concurrency, rate or trace arrivals, one request is sent at a time.

    Args:
        trace_length: number of requests in the trace; ``None`` without a trace.

    Raises:
        ConfigError: options exclude each other, or numbers give no valid load.
    """
    arrival = None if settings.arrival is None else known_name("--arrival", settings.arrival, ARRIVALS)
    check_positive("--burstiness", settings.burstiness)
    check_positive("--speed-up", settings.speed_up)
    if settings.concurrency and (settings.rate or arrival):
        raise ConfigError("--concurrency makes a closed loop, --rate and --arrival an open loop. Give only one kind.")
    if arrival == TRACE:
        if trace_length is None:
            raise ConfigError("--arrival trace replays the times of a trace. Give its file: --trace FILE.")
        if settings.rate:
            raise ConfigError("--arrival trace replays the times of --trace, so --rate has no effect. Use --speed-up.")
        return [_open_stage(settings, 0, TRACE, 0.0, _trace_bounds(settings, trace_length))]
    if arrival and not settings.rate:
        raise ConfigError(f"--arrival {arrival} needs --rate, in requests per second.")
    if settings.rate:
        for rate in settings.rate:
            check_positive("--rate", rate, MAX_RATE)
        bounds = _bounds(settings, settings.warmup_requests or 0)
        return [
            _open_stage(settings, index, arrival or POISSON, rate, bounds) for index, rate in enumerate(settings.rate)
        ]
    return _closed_stages(settings)


def _closed_stages(settings: LoadSettings) -> list[Stage]:
    clients = settings.concurrency or (1,)
    if min(clients) < 1:
        raise ConfigError(f"--concurrency must be at least 1; got {min(clients)}.")
    requests = DEFAULT_REQUESTS if settings.requests is None else settings.requests
    room = max(1, requests + (settings.warmup_requests or 0))
    if max(clients) > room:
        raise ConfigError(
            f"--concurrency {max(clients)} is more than the {room} requests of a stage. Lower it or raise --requests."
        )
    warmups = [count if settings.warmup_requests is None else settings.warmup_requests for count in clients]
    return [
        Stage(index, _bounds(settings, warmup), concurrency=count)
        for index, (count, warmup) in enumerate(zip(clients, warmups, strict=True))
    ]


def _open_stage(settings: LoadSettings, index: int, arrival: str, rate: float, bounds: Bounds) -> Stage:
    if settings.max_inflight is not None and settings.max_inflight < 1:
        raise ConfigError("--max-inflight must be at least 1.")
    return Stage(
        index, bounds, arrival,
        rate=rate, burstiness=settings.burstiness, speed_up=settings.speed_up, max_inflight=settings.max_inflight,
    )  # fmt: skip


def _bounds(settings: LoadSettings, warmup_requests: int) -> Bounds:
    return Bounds(
        DEFAULT_REQUESTS if settings.requests is None else settings.requests,
        DEFAULT_SECONDS if settings.duration_s is None else settings.duration_s,
        warmup_requests,
        settings.warmup_s,
        settings.grace_s,
    )


def _trace_bounds(settings: LoadSettings, trace_length: int) -> Bounds:
    """Bounds of a replay, which ends with its trace by default."""
    warmup_requests = settings.warmup_requests or 0
    if (asked := (settings.requests or 0) + warmup_requests) > trace_length:
        raise ConfigError(
            f"--requests and --warmup-requests ask for {asked}, but the trace has {trace_length} requests."
        )
    return Bounds(
        max(1, trace_length - warmup_requests) if settings.requests is None else settings.requests,
        DEFAULT_TRACE_SECONDS if settings.duration_s is None else settings.duration_s,
        warmup_requests,
        settings.warmup_s,
        settings.grace_s,
    )
