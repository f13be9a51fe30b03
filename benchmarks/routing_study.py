"""What routing, admission and local prefill are worth: ``python -m benchmarks.routing_study --trace FILE [--help]``.

Replays one trace against the real router and simulated workers, in virtual time:

* rates: attainment of round-robin and of baton by rate, and the highest rate of each that keeps 90 %;
* ablation: at one rate, each scorer, local prefill and admission left out in turn;
* overload: a mix of classes at several times the rate that the pools can bear.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.document import check_writable
from baton.bench.option_text import known_name, positive_number
from baton.bench.traces import read_trace
from baton.core.errors import ConfigError
from benchmarks.parallel import mapping
from cluster.config.config import load_config
from cluster.routing.routing_config import DEFAULT_WEIGHTS
from cluster.simulation.entry import ROUTERS
from cluster.simulation.profile import DEFAULT_PROFILE, load_profile
from cluster.simulation.replay import ReplaySettings, replay
from cluster.simulation.report import ALL, percent
from cluster.simulation.settings import longest_request
from cluster.simulation.workload import make_arrivals

_PARTS = ("rates", "ablation", "overload")
_OBJECTIVE = 0.9
_ROUND_ROBIN, _BATON = "round_robin", "baton"
_MIX = {"interactive": 2.0, "standard": 5.0, "batch": 3.0}


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay to run.

    Attributes:
        label: what it is called in tables.
        scale: how many times as fast as recorded requests arrive.
        overrides: of the configuration.
        shares: class → share of the requests; empty: all of the default class.
    """

    label: str
    scale: float
    overrides: Mapping[str, Any]
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Study:
    """What all replays have in common."""

    trace: Path
    config: Path
    num_requests: int
    warmup_requests: int
    seed: int

    def run(self, wanted: Replay) -> dict[str, Any]:
        """The replay's document; its ``classes`` hold the figures."""
        config = load_config(self.config, wanted.overrides)
        profile = load_profile(config.simulation.profile or DEFAULT_PROFILE)
        arrivals = make_arrivals(
            read_trace(self.trace),
            rate_scale=wanted.scale,
            num_requests=self.warmup_requests + self.num_requests,
            shares=wanted.shares or {config.slo.default: 1.0},
            max_tokens=longest_request(config, profile),
            seed=self.seed,
        )
        warmup_s = arrivals[self.warmup_requests].at_s if self.warmup_requests else 0.0
        return replay(config, profile, arrivals, ReplaySettings(warmup_s)).document


def highest_rate(points: Sequence[tuple[float, float]], objective: float = _OBJECTIVE) -> float | None:
    """Where attainment falls below the objective, between the last rate that keeps it and the next one.

    Args:
        points: (rate, attainment) by rising rate.

    Returns:
        Interpolated; None when no rate keeps it; the highest one when all do.
    """
    kept = [index for index, (_, attained) in enumerate(points) if attained >= objective]
    if not kept:
        return None
    last = kept[-1]
    if last + 1 == len(points):
        return points[last][0]
    (rate, attained), (next_rate, next_attained) = points[last], points[last + 1]
    return rate + (next_rate - rate) * (attained - objective) / (attained - next_attained)


def rate_replays(scales: Sequence[float]) -> Iterator[Replay]:
    for router in (_ROUND_ROBIN, _BATON):
        for scale in scales:
            yield Replay(router, scale, ROUTERS[router], {})


def ablations(scale: float) -> Iterator[Replay]:
    yield Replay("baton", scale, {}, {})
    for scorer, weight in DEFAULT_WEIGHTS.items():
        if weight:
            yield Replay(f"without {scorer}", scale, {f"routing.scorers.{scorer}": 0}, {})
    for scorer in ("slo_headroom", "prefix_affinity", "queue_depth", "least_loaded"):
        alone: dict[str, Any] = {f"routing.scorers.{name}": 0 for name in DEFAULT_WEIGHTS}
        yield Replay(f"{scorer} alone", scale, {**alone, f"routing.scorers.{scorer}": 1}, {})
    yield Replay("without local prefill", scale, {"routing.local_prefill": "never"}, {})
    yield Replay("without admission", scale, {"admission.mode": "off"}, {})
    yield Replay("round_robin", scale, ROUTERS[_ROUND_ROBIN], {})


def overloads(scale: float) -> Iterator[Replay]:
    for factor in (1.0, 2.0, 3.0):
        yield Replay(f"{factor:g} x the highest rate", scale * factor, {}, _MIX)
    yield Replay("3 x, without admission", scale * 3, {"admission.mode": "off"}, _MIX)


def outcome_table(title: str, results: Sequence[tuple[Replay, Mapping[str, Any]]]) -> Table:
    """A row for each replay and, where there are several, each class."""
    shown = Table(title=title)
    columns = ("", "requests/s", "class", "met", "met of admitted", "rejected", "goodput/s", "TTFT p50/p90 ms",
               "TPOT p50/p90 ms", "local", "cached")  # fmt: skip
    for column in columns:
        shown.add_column(column, justify="left" if column in ("", "class") else "right")
    for wanted, document in results:
        classes = document["classes"]
        for name in [name for name in classes if name != ALL] if wanted.shares else [ALL]:
            row = classes[name]
            shown.add_row(
                wanted.label,
                f"{document['replay']['requests_per_s']:.1f}",
                name,
                percent(row["attainment"]),
                percent(row["admitted_attainment"]),
                f"{row['rejected']} of {row['requests']}",
                f"{row['goodput_per_s']:.2f}",
                _two(row["ttft_ms"]),
                _two(row["tpot_ms"]),
                percent(row["local_share"]),
                percent(row["cached_share"]),
            )
    return shown


def _two(percentiles: Mapping[str, float] | None) -> str:
    return "-" if percentiles is None else f"{percentiles['p50']:.4g} / {percentiles['p90']:.4g}"


def _run_all(study: Study, wanted: Sequence[Replay], num_processes: int) -> list[tuple[Replay, dict[str, Any]]]:
    with mapping(num_processes) as each:
        return list(zip(wanted, each(study.run, wanted), strict=True))


def rates_line(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The highest rate of both routers in words; where it lies outside the rates that were tried, its bound.

    Args:
        points: by router, (rate, attainment) by rising rate.
    """
    said, rates = [], {}
    for router in (_ROUND_ROBIN, _BATON):
        rate = highest_rate(points[router])
        lowest, highest = points[router][0][0], points[router][-1][0]
        rates[router] = lowest if rate is None else rate
        bound = "below" if rate is None else "at least" if rate >= highest else ""
        said.append(f"{router} {bound} {rates[router]:.1f}".replace("  ", " "))
    line = f"Highest rate, in requests/s, with {_OBJECTIVE:.0%} attainment: {', '.join(said)}"
    if "at least" in said[0] or "below" in said[1]:
        return f"{line}."
    least = "at least " if "below" in said[0] or "at least" in said[1] else ""
    return f"{line}; {least}{rates[_BATON] / rates[_ROUND_ROBIN]:.2f} times as many."


def _points(results: Sequence[tuple[Replay, Mapping[str, Any]]]) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {_ROUND_ROBIN: [], _BATON: []}
    for wanted, document in results:
        points[wanted.label].append((document["replay"]["requests_per_s"], document["classes"][ALL]["attainment"]))
    return points


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL or Azure CSV")
    parser.add_argument("-c", "--config", type=Path, default=Path("deploy/simulated-64.yaml"))
    parser.add_argument("--parts", default=",".join(_PARTS))
    parser.add_argument("--scales", default="1.5,2,2.5,3,4,5,6,7,8", help="rates, as multiples of the recorded one")
    parser.add_argument("--scale", type=float, default=5.0, help="of the ablation")
    parser.add_argument("--full-scale", type=float, default=18.0, help="what the pools can bear; of the overload")
    parser.add_argument("--requests", type=int, default=3000, help="that count, in each replay")
    parser.add_argument("--warm-up", type=int, default=300, help="requests before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        parts = [known_name("--parts", part.strip(), _PARTS) for part in chosen.parts.split(",")]
        scales = sorted(positive_number("--scales", text) for text in chosen.scales.split(","))
        read_trace(chosen.trace)
        load_config(chosen.config)
        if chosen.json is not None:
            check_writable("--json", chosen.json)
    except ConfigError as error:
        parser.error(str(error))
    if chosen.requests < 1 or chosen.warm_up < 0 or chosen.processes < 1:
        parser.error("--requests and --processes must be at least 1, --warm-up at least 0")
    study = Study(chosen.trace, chosen.config, chosen.requests, chosen.warm_up, chosen.seed)
    console = Console(width=max(160, Console().width))
    replays = {
        "rates": list(rate_replays(scales)),
        "ablation": list(ablations(chosen.scale)),
        "overload": list(overloads(chosen.full_scale)),
    }
    found = {}
    for part in parts:
        results = _run_all(study, replays[part], chosen.processes)
        console.print(outcome_table(part, results))
        if part == "rates":
            console.print(rates_line(_points(results)))
        found[part] = [{"label": own.label, "scale": own.scale, **document} for own, document in results]
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
