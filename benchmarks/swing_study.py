"""How well the autoscaler follows swings: ``python -m benchmarks.swing_study --trace FILE [--help]``.

A trace goes to the real router and autoscaler over simulated workers, in virtual time, once with a rate that swings by
4x and once with prompts that become 4x as long while answers become 4x as short. The oracle knows the swings: it
changes pools exactly then, in no time, to the smallest fixed ones that keep the objective in that phase.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.bench.document import check_writable
from baton.bench.option_text import known_name
from baton.bench.traces import TraceRequest, read_trace
from baton.core.errors import ConfigError
from baton.core.roles import DECODE, POOLS, PREFILL
from benchmarks.parallel import mapping
from cluster.config.config import BatonConfig, load_config
from cluster.config.config_reading import parse_override
from cluster.simulation.profile import DEFAULT_PROFILE, load_profile
from cluster.simulation.replay import ReplayResult, ReplaySettings, replay
from cluster.simulation.report import ReplayedRequest, percent, summarize
from cluster.simulation.schedule import Schedule
from cluster.simulation.settings import longest_request
from cluster.simulation.workload import Arrival, make_arrivals

OBJECTIVE = 0.95
MOST_HOURS = 1.25
"""Times the oracle's."""
SETTLE_S = 60.0
"""Of each phase, not judged: neither the autoscaler's nor the oracle's."""
_MOST_WORKERS = 128
_GOLDEN = 0.6180339887
"""Multiples of it lie far apart round a circle: no two seeds begin a trace nearly alike."""


@dataclass(frozen=True, slots=True)
class Load:
    """What comes in during a phase, as factors of the trace."""

    rate: float
    prompts: float = 1.0
    answers: float = 1.0


SWINGS: Mapping[str, tuple[Load, ...]] = {
    "load": (Load(1, 0.5, 2), Load(4, 0.5, 2), Load(1, 0.5, 2)),
    "mix": (Load(2, 0.125, 4), Load(2, 0.5, 1), Load(2, 0.125, 4)),
}
"""Prompts are at most half as long as recorded: one in twenty of the Mooncake conversation trace has more than 45,000
tokens, for which even an idle worker of the profile ``h100-8b`` takes more than three seconds. Answers are longer, so
that there is work for more workers in as many requests."""


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """
    Attributes:
        attainment: behind the first seconds of the phase; None: no request counted.
        hours: of workers that were paid for, by pool, from the phase's begin to its end.
        oracle: workers by pool.
    """

    swing: str
    phase: int
    requests_per_s: float
    attainment: float | None
    hours: Mapping[str, float]
    oracle: Mapping[str, int]
    oracle_attainment: float | None
    oracle_hours: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Study:
    """
    Attributes:
        scale: how many times as fast as recorded requests arrive when a load's rate is 1.
        phase_s: of each phase.
        begin: workers of each pool when the autoscaler begins.
        seed: of prompts, and where in the trace the study begins.
        overrides: of the configuration, for the autoscaler and the oracle alike.
    """

    trace: Path
    config: Path
    scale: float
    phase_s: float
    begin: int
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def arrivals(self, swing: str) -> list[Arrival]:
        """Of all phases. A trace that is too short is repeated, with other prompts.

        Raises:
            ConfigError: the trace cannot be used.
        """
        loads = SWINGS[swing]
        config = self._config({})
        trace = read_trace(self.trace)
        if trace[-1].at_s <= 0:
            raise ConfigError(f"--trace: the requests of {self.trace} all arrive at once. Expected a rate.")
        trace = begun_elsewhere(trace, self.seed)
        recorded_s = sum(load.rate for load in loads) * self.scale * self.phase_s

        def schedule(factors: Sequence[float]) -> Schedule:
            return Schedule(tuple((index * self.phase_s, factor) for index, factor in enumerate(factors)))

        arrivals = make_arrivals(
            trace,
            num_requests=_requests_within(trace, recorded_s),
            rate_scale=schedule([self.scale * load.rate for load in loads]),
            input_scale=schedule([load.prompts for load in loads]),
            output_scale=schedule([load.answers for load in loads]),
            shares={config.slo.default: 1.0},
            max_tokens=longest_request(config, load_profile(config.simulation.profile or DEFAULT_PROFILE)),
            seed=self.seed,
        )
        return [arrival for arrival in arrivals if arrival.at_s < self.phase_s * len(loads)]

    def follow(self, swing: str) -> ReplayResult:
        """The autoscaler's way through a swing."""
        pools = {f"{pool}.workers": self.begin for pool in POOLS}
        return self._replay(self.arrivals(swing), {"autoscaler.enabled": True, **pools}, ReplaySettings())

    def oracle(self, phase: tuple[str, int, tuple[int, int]]) -> tuple[tuple[int, int], float | None]:
        """(the smallest pools for a phase, what they attain); ``phase``: swing, number, pools to begin the search with.

        They are judged like the autoscaler: behind the first seconds.
        """
        swing, index, begin = phase
        since_s, until_s = index * self.phase_s, (index + 1) * self.phase_s
        arrivals = [
            Arrival(arrival.at_s - since_s, arrival.prompt_token_ids, arrival.params, arrival.slo)
            for arrival in self.arrivals(swing)
            if since_s <= arrival.at_s < until_s
        ]

        # Pools that are far too small take longest, and nobody wants to know how bad they are.
        num_counted = sum(arrival.at_s >= SETTLE_S for arrival in arrivals)
        most_missed = int((1 - OBJECTIVE) * num_counted) + 1

        @cache
        def attained(prefill: int, decode: int) -> float | None:
            pools = {"autoscaler.enabled": False, "prefill.workers": prefill, "decode.workers": decode}
            return attainment(self._replay(arrivals, pools, ReplaySettings(SETTLE_S, most_missed=most_missed)).requests)

        pools = smallest_pools(lambda prefill, decode: (attained(prefill, decode) or 0.0) >= OBJECTIVE, begin)
        return pools, attained(*pools)

    def judge(
        self, swing: str, index: int, result: ReplayResult, pools: tuple[int, int], kept: float | None
    ) -> PhaseOutcome:
        """A phase of a swing; ``pools``, ``kept``: the oracle's."""
        since_s, until_s = index * self.phase_s, (index + 1) * self.phase_s
        own = [request for request in result.requests if since_s <= request.arrived_s < until_s]
        oracle = {PREFILL: pools[0], DECODE: pools[1]}
        return PhaseOutcome(
            swing,
            index + 1,
            len(own) / self.phase_s,
            attainment([request for request in own if request.arrived_s >= since_s + SETTLE_S]),
            {pool: worker_hours(result.document["sizes"], pool, since_s, until_s) for pool in POOLS},
            oracle,
            kept,
            {pool: size * self.phase_s / 3600 for pool, size in oracle.items()},
        )

    def usual_pools(self, result: ReplayResult, index: int) -> tuple[int, int]:
        """That the autoscaler had in a phase, rounded up: where to look for the oracle's."""
        since_s, until_s = index * self.phase_s, (index + 1) * self.phase_s
        prefill, decode = (
            ceil(worker_hours(result.document["sizes"], pool, since_s, until_s) * 3600 / self.phase_s) for pool in POOLS
        )
        return prefill, decode

    def _config(self, overrides: Mapping[str, Any]) -> BatonConfig:
        return load_config(self.config, {**self.overrides, **overrides})

    def _replay(
        self, arrivals: Sequence[Arrival], overrides: Mapping[str, Any], settings: ReplaySettings
    ) -> ReplayResult:
        config = self._config(overrides)
        profile = load_profile(config.simulation.profile or DEFAULT_PROFILE)
        return replay(config, profile, arrivals, settings)


def begun_elsewhere(trace: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """The trace from another of its requests on, round to the one before; ``seed`` 0: as it is."""
    first = int(seed * _GOLDEN % 1.0 * len(trace))
    length_s = trace[-1].at_s * len(trace) / max(1, len(trace) - 1)
    turned = [*trace[first:], *(replace(request, at_s=request.at_s + length_s) for request in trace[:first])]
    return [replace(request, at_s=request.at_s - turned[0].at_s) for request in turned]


def _requests_within(trace: Sequence[TraceRequest], seconds: float) -> int:
    """At least as many as arrive in so long, the trace repeated if need be."""
    laps, rest_s = divmod(seconds, trace[-1].at_s)
    return int(laps) * len(trace) + bisect_right(trace, rest_s, key=lambda request: request.at_s)


def attainment(requests: Sequence[ReplayedRequest]) -> float | None:
    """Share of those that count which kept both targets."""
    share: float | None = summarize(requests, 0.0)["attainment"]
    return share


def worker_hours(sizes: Sequence[tuple[float, str, int]], pool: str, since_s: float, until_s: float) -> float:
    """
    Args:
        sizes: (second, pool, its size from then on), ascending, as a replay's document has them.
    """
    spans = _spans(sizes, pool, until_s)
    return sum(size * max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s, size in spans) / 3600


def _spans(sizes: Sequence[tuple[float, str, int]], pool: str, until_s: float) -> list[tuple[float, float, int]]:
    """(begin, end, size) of a pool, up to a moment."""
    own = [(at_s, size) for at_s, of, size in sizes if of == pool and at_s < until_s]
    return [(at_s, next_s, size) for (at_s, size), (next_s, _) in pairwise([*own, (until_s, 0)])]


def smallest_pools(keeps: Callable[[int, int], bool], begin: tuple[int, int]) -> tuple[int, int]:
    """The fewest (prefill, decode) workers that do.

    Args:
        keeps: for numbers of workers; more of either never hurt.
        begin: that might do; more are tried where they do not.

    Raises:
        ConfigError: no number of workers does.
    """
    prefill, decode = begin
    while not keeps(prefill, decode):
        if prefill + decode > _MOST_WORKERS:
            raise ConfigError(
                f"Not even {prefill} + {decode} workers keep the targets of {OBJECTIVE:.0%} of the requests, so more "
                "workers do not help. Loosen the targets of slo.default's class in --config."
            )
        prefill, decode = 2 * prefill, 2 * decode
    prefill = _first(prefill, lambda number: keeps(number, decode))
    decode = _first(decode, partial(keeps, prefill))
    # One more of the one pool may save several of the other.
    while decode > 2 and keeps(prefill + 1, decode - 2):
        prefill += 1
        decode = _first(decode - 2, partial(keeps, prefill))
    while prefill > 2 and keeps(prefill - 2, decode + 1):
        decode += 1
        prefill = _first(prefill - 2, partial(_flipped, keeps, decode))
    return prefill, decode


def _flipped(keeps: Callable[[int, int], bool], decode: int, prefill: int) -> bool:
    return keeps(prefill, decode)


def _first(most: int, keeps: Callable[[int], bool]) -> int:
    """The least number up to ``most`` that does, which is looked for from above: trying far too few takes long."""
    high, step = most, 1
    while high > step and keeps(high - step):
        high, step = high - step, 2 * step
    low = max(1, high - step + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle + 1, high)
    return low


def outcome_table(outcomes: Sequence[PhaseOutcome]) -> Table:
    """A row for each phase, and one for the hours of each swing."""
    table = Table(title=f"attainment behind the first {SETTLE_S:g} s of each phase; worker-hours of all of it")
    columns = ("swing", "phase", "requests/s", "met", "hours prefill + decode", "oracle: workers", "met",
               "hours prefill + decode", "hours / oracle's")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "swing" else "right")
    for swing in dict.fromkeys(outcome.swing for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.swing == swing]
        for outcome in own:
            table.add_row(
                swing, str(outcome.phase), f"{outcome.requests_per_s:.2f}", percent(outcome.attainment),
                _two(outcome.hours), f"{outcome.oracle[PREFILL]} + {outcome.oracle[DECODE]}",
                percent(outcome.oracle_attainment), _two(outcome.oracle_hours),
                f"{sum(outcome.hours.values()) / sum(outcome.oracle_hours.values()):.2f}",
            )  # fmt: skip
        hours, oracle = total_hours(own)
        table.add_row(
            swing, "all", "", "", f"{hours:.3f}", "", "", f"{oracle:.3f}", f"{hours / oracle:.2f}", end_section=True
        )
    return table


def total_hours(outcomes: Sequence[PhaseOutcome]) -> tuple[float, float]:
    """(of the autoscaler, of the oracle), both pools together."""
    own = sum(sum(outcome.hours.values()) for outcome in outcomes)
    return own, sum(sum(outcome.oracle_hours.values()) for outcome in outcomes)


def verdict(outcomes: Sequence[PhaseOutcome]) -> str:
    """Whether every phase kept the objective, at no more than so many times the oracle's hours."""
    missed = [outcome for outcome in outcomes if (outcome.attainment or 0.0) < OBJECTIVE]
    hours, oracle = total_hours(outcomes)
    phases = ", ".join(f"{outcome.swing} {outcome.phase} ({percent(outcome.attainment)})" for outcome in missed)
    kept = f"Below {OBJECTIVE:.0%}: {phases}." if missed else f"Every phase kept {OBJECTIVE:.0%}."
    return f"{kept} Worker-hours: {hours / oracle:.2f} times the oracle's; at most {MOST_HOURS:g} were asked for."


def _two(hours: Mapping[str, float]) -> str:
    return f"{hours[PREFILL]:.3f} + {hours[DECODE]:.3f}"


def run(study: Study, swings: Sequence[str], num_processes: int, tell: Callable[[str], None]) -> list[PhaseOutcome]:
    """All phases of some swings.

    Args:
        tell: hears of every part that is done.

    Raises:
        ConfigError: the trace cannot be used, or the targets cannot be kept.
    """
    outcomes = []
    with mapping(num_processes) as each:
        results = {}
        for swing, result in zip(swings, each(study.follow, swings), strict=True):
            results[swing] = result
            tell(f"{swing}: the autoscaler went through it")
        phases = [(swing, index) for swing in swings for index in range(len(SWINGS[swing]))]
        wanted = [(swing, index, study.usual_pools(results[swing], index)) for swing, index in phases]
        for (swing, index), oracle in zip(phases, each(study.oracle, wanted), strict=True):
            outcomes.append(study.judge(swing, index, results[swing], *oracle))
            tell(f"{swing}, phase {index + 1}: {_told(outcomes[-1])}")
    return outcomes


def _told(outcome: PhaseOutcome) -> str:
    (prefill, decode), met = (outcome.oracle[pool] for pool in POOLS), percent(outcome.attainment)
    own, ideal = (sum(hours.values()) for hours in (outcome.hours, outcome.oracle_hours))
    return f"met {met} in {own:.3f} worker-hours; the oracle has {prefill} + {decode} workers, {ideal:.3f} hours"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL or Azure CSV")
    parser.add_argument("-c", "--config", type=Path, default=Path("deploy/simulated-64.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--swings", default=",".join(SWINGS))
    parser.add_argument("--scale", type=float, default=1.4, help="rate, as a multiple of the recorded one")
    parser.add_argument("--phase", type=float, default=600.0, help="seconds of each phase")
    parser.add_argument("--begin", type=int, default=2, help="workers of each pool at first")
    parser.add_argument("--seed", type=int, default=0, help="0: the trace from its first request on; others: elsewhere")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.scale <= 0 or min(chosen.begin, chosen.processes) < 1:
        parser.error("--scale must be above 0, --begin and --processes at least 1")
    if chosen.phase <= SETTLE_S:
        parser.error(f"--phase must be more than {SETTLE_S:g} s, which are not judged")
    console = Console(width=max(140, Console().width))
    try:
        overrides = dict(map(parse_override, chosen.set))
        load_config(chosen.config, overrides)
        study = Study(chosen.trace, chosen.config, chosen.scale, chosen.phase, chosen.begin, chosen.seed, overrides)
        swings = [known_name("--swings", name.strip(), SWINGS) for name in chosen.swings.split(",")]
        if chosen.json is not None:
            check_writable("--json", chosen.json)
        outcomes = run(study, swings, chosen.processes, lambda text: console.print(f"[dim]{text}[/dim]"))
    except ConfigError as error:
        parser.error(str(error))
    console.print(outcome_table(outcomes), Text(verdict(outcomes)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
