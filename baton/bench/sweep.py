"""``baton bench sweep``: finds the goodput of an endpoint by probing request rates in open loops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console, Group, RenderableType
from rich.text import Text

from baton.bench.assembly import WorkloadPlan, plan_workload
from baton.bench.checklist import Check, checklist
from baton.bench.document import SWEEP_FORMAT, check_writable, make_header, write_report
from baton.bench.goodput_search import RateVerdict, SearchLimits, SearchResult, search_goodput
from baton.bench.latency import percentile_ms
from baton.bench.runner import StageRun
from baton.bench.sample import Slo, parse_slo
from baton.bench.session import InterruptedBeforeLoadError, Session, open_session, stop_on_signals
from baton.bench.settings import (
    INTERRUPTED_STATUS,
    TargetSettings,
    WorkloadSettings,
    check_all_used,
    load_settings,
    pick,
)
from baton.bench.stage_result import StageResult, evaluate
from baton.bench.stages import MAX_RATE, TRACE, LoadSettings, plan_stages
from baton.bench.tables import render_checklist
from baton.core.errors import ConfigError
from baton.core.figure_table import figure_table
from baton.core.option_text import check_positive


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """Settings of a sweep.

    Attributes:
        slo: limits that a request must meet.
        percentile: percentage of the requests that must meet them, such as 90.
        json_file: file for the whole report.
    """

    slo: str
    percentile: float = 90.0
    start_rate: float = 1.0
    min_rate: float = 0.05
    max_rate: float = 1000.0
    precision: float = 0.05
    max_rates: int = 16
    max_repeats: int = 3
    json_file: Path | None = None

    def limits(self) -> SearchLimits:
        """The limits of the search.

        Raises:
            ConfigError: the numbers leave no range to search.
        """
        if not 0 < self.percentile < 100:
            raise ConfigError(f"--percentile must be between 0 and 100; got {self.percentile:g}.")
        rates = {"--min-rate": self.min_rate, "--start-rate": self.start_rate, "--max-rate": self.max_rate}
        for option, rate in rates.items():
            check_positive(option, rate, MAX_RATE)
        if not self.min_rate <= self.start_rate <= self.max_rate:
            given = ", ".join(f"{rate:g}" for rate in rates.values())
            raise ConfigError(f"{', '.join(rates)} must be in ascending order; got {given}.")
        check_positive("--precision", self.precision)
        for option, count in (("--max-rates", self.max_rates), ("--repeats", self.max_repeats)):
            if count < 1:
                raise ConfigError(f"{option} must be at least 1; got {count}.")
        return SearchLimits(
            self.start_rate, self.min_rate, self.max_rate, self.precision, self.max_rates, self.percentile / 100.0,
            self.max_repeats,
        )  # fmt: skip


def sweep(options: Mapping[str, Any], console: Console) -> tuple[RenderableType, int]:
    """Runs ``baton bench sweep``: probes rates until the goodput is known.

    Args:
        options: values by the names of the settings.

    Returns:
        The report to show, and the exit status: 130 after a signal, 1 if no rate held or one could not be measured.

    Raises:
        BatonError: options exclude each other, the endpoint does not answer, or the file cannot be written. In the last
            case the table is shown on ``console``.
    """
    target, workload, load = load_settings(options)
    settings = pick(SweepSettings, options)
    slo, limits = parse_slo("--slo", settings.slo), settings.limits()
    if load.arrival == TRACE:
        raise ConfigError(
            "A sweep varies the rate, but --arrival trace has fixed times. Use poisson, bursty or constant."
        )
    plan_stages(replace(load, rate=(limits.highest,)), None)  # checks the options early
    if settings.json_file is not None:
        check_writable("--json", settings.json_file)
    plan = plan_workload(workload)
    check_all_used(workload, load, is_open=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result, probes, session, stopped = runner.run(_search(target, workload, plan, load, slo, limits, console))
    except InterruptedBeforeLoadError:
        return Text("interrupted before the load began"), INTERRUPTED_STATUS
    shown = _render(result, probes, slo, settings)
    if settings.json_file is not None:
        asked = {"load": asdict(load), "sweep": {**asdict(settings), "slo": slo.to_dict()}}
        header = make_header(SWEEP_FORMAT, target, workload, asked, session.target)
        document = {**header, "notes": session.notes, **_result_dict(result, probes)}
        write_report(document, settings.json_file, shown, console)
    if stopped:
        return shown, INTERRUPTED_STATUS
    return shown, 1 if result.goodput is None or result.unmeasured_at is not None else 0


async def _search(
    target: TargetSettings,
    workload: WorkloadSettings,
    plan: WorkloadPlan,
    load: LoadSettings,
    slo: Slo,
    limits: SearchLimits,
    console: Console,
) -> tuple[SearchResult, list[StageResult], Session, bool]:
    probes: list[StageResult] = []
    with stop_on_signals() as stop:
        async with open_session(target, workload, plan, console, stop) as session:

            async def probe(rate: float) -> tuple[int, int] | None:
                (stage,) = plan_stages(replace(load, rate=(rate,)), None)
                # A new index gives new lengths, arrivals and texts, so a repeated probe is an independent observation.
                run = StageRun(replace(stage, index=len(probes)))
                await session.run(run, stop)
                result = evaluate(run, slo)
                probes.append(result)
                console.print(Text(_probe_line(result)), soft_wrap=True)
                num_good = round((result.attainment or 0.0) * result.num_measured)
                return None if stop.is_set() else (num_good, result.num_measured)

            return await search_goodput(probe, limits), probes, session, stop.is_set()


def _probe_line(result: StageResult) -> str:
    if not result.num_measured:
        return f"{result.label}: nothing was measured"
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    return f"{result.label}: {result.attainment or 0.0:.1%} of {result.num_measured} met the targets{failed}"


def _result_dict(result: SearchResult, probes: Sequence[StageResult]) -> dict[str, object]:
    return {
        "goodput_requests_per_s": result.goodput,
        "failed_at_requests_per_s": result.failed_at,
        "unmeasured_at_requests_per_s": result.unmeasured_at,
        "is_complete": result.is_complete,
        "rates": [
            {
                **asdict(verdict),
                "attainment": verdict.attainment,
                "interval95": verdict.interval,
                "holds": verdict.holds,
            }
            for verdict in result.verdicts
        ],
        "checklist": [check.to_dict() for check in _checks(result, probes)],
        "probes": [probe.to_dict(with_samples=False) for probe in probes],
    }


def _checks(result: SearchResult, probes: Sequence[StageResult]) -> list[Check]:
    """The checklist of the probes at the goodput: beyond it the server is overloaded, which is no steady state."""
    return checklist([probe for probe in probes if probe.run.stage.rate == result.goodput], len(result.verdicts))


def _render(result: SearchResult, probes: Sequence[StageResult], slo: Slo, sweep: SweepSettings) -> RenderableType:
    rank = f"p{sweep.percentile:g}"
    table = figure_table(
        "rate/s", "probes", "requests", "met", "95 %", f"TTFT {rank}", f"TPOT {rank}", "failed", num_left=0
    )
    table.add_column("")
    for verdict in sorted(result.verdicts, key=lambda verdict: verdict.rate):
        own = [probe for probe in probes if probe.run.stage.rate == verdict.rate]
        table.add_row(*_cells(verdict, own, sweep.percentile), style=None if verdict.holds else "dim")
    answer = Text(_answer(result, slo, sweep), style="bold")
    if not result.verdicts:
        return answer
    checks = _checks(result, probes)
    parts: list[RenderableType] = [table, Text(""), answer]
    if checks:
        parts += [Text(""), render_checklist(checks)]
    return Group(*parts)


def _cells(verdict: RateVerdict, probes: Sequence[StageResult], percentile: float) -> list[str]:
    low, high = verdict.interval
    samples = [sample for probe in probes for sample in probe.run.samples if sample.is_ok and not sample.is_warmup]
    ttft = percentile_ms((s.ttft_s(from_send=False) for s in samples), percentile)
    tpot = percentile_ms((s.tpot_s() for s in samples), percentile)
    return [
        f"{verdict.rate:.3g}",
        str(verdict.num_probes),
        str(verdict.num_requests),
        f"{verdict.attainment:.1%}",
        f"{low:.1%}-{high:.1%}",
        f"{ttft:.0f}",
        f"{tpot:.1f}",
        str(sum(probe.num_failed for probe in probes)),
        ("holds" if verdict.holds else "misses") + ("" if verdict.is_certain else ", barely"),
    ]


def _answer(result: SearchResult, slo: Slo, sweep: SweepSettings) -> str:
    what = f"{sweep.percentile:g} % of the requests meet {slo.describe()}"
    if result.unmeasured_at is not None:
        known = "no rate is known to hold" if result.goodput is None else f"at {result.goodput:.3g}/s, {what}"
        return (
            f"No request was measured at {result.unmeasured_at:.3g}/s, so that rate is undecided; "
            f"{known}. Give probes a "
            "longer --duration or less warm-up, or search from a higher --min-rate and --start-rate."
        )
    if not result.verdicts:
        return "The search was interrupted before any rate had a verdict, so the goodput is unknown."
    if result.goodput is None:
        return f"At no probed rate, {what}." + ("" if result.is_complete else " The search did not finish.")
    above = "higher rates were not allowed" if result.failed_at is None else f"at {result.failed_at:.3g}/s, fewer do"
    ending = "" if result.is_complete else " The search did not finish: the bracket is wider than requested."
    return f"Goodput: {result.goodput:.3g} requests/s. At this rate, {what}; {above}.{ending}"
