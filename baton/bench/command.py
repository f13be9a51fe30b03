"""``baton bench serve``: puts load on an endpoint in stages, and reports the results."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console, RenderableType
from rich.text import Text

from baton.bench.assembly import WorkloadPlan, plan_workload
from baton.bench.document import check_writable, serve_document, write_report
from baton.bench.runner import StageRun
from baton.bench.sample import Slo, parse_slo
from baton.bench.session import InterruptedBeforeLoadError, Session, open_session, stop_on_signals, without_interruption
from baton.bench.settings import (
    INTERRUPTED_STATUS,
    TargetSettings,
    WorkloadSettings,
    check_all_used,
    load_settings,
    pick,
)
from baton.bench.stage_result import StageResult, evaluate
from baton.bench.stages import Stage, plan_stages
from baton.bench.tables import render_run
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Options of the report.

    Attributes:
        slo: text for :func:`baton.bench.sample.parse_slo`; ``None`` without an SLO.
        json_file: file for the whole report.
        with_samples: whether the report includes every request.
    """

    slo: str | None = None
    json_file: Path | None = None
    with_samples: bool = False


def serve(options: Mapping[str, Any], console: Console) -> tuple[RenderableType, int]:
    """Runs ``baton bench serve``: checks all options, then runs all stages with progress on ``console``.

    Args:
        options: values by the names of the settings.

    Returns:
        The report to show, and the exit status: 130 after a signal, 1 without a single answer.

    Raises:
        BatonError: options exclude each other, the endpoint does not answer, or the file cannot be written. In the last
            case the tables are shown on ``console``.
    """
    target, workload, load = load_settings(options)
    output = pick(OutputSettings, options)
    slo = None if output.slo is None else parse_slo("--slo", output.slo)
    if output.with_samples and output.json_file is None:
        raise ConfigError("--samples writes every request to the file of --json. Add --json, or leave out --samples.")
    if output.json_file is not None:
        check_writable("--json", output.json_file)
    plan = plan_workload(workload)
    stages = plan_stages(load, plan.trace_length)
    check_all_used(workload, load, is_open=stages[0].is_open)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results, session = runner.run(_measure(target, workload, plan, stages, slo, console))
    except InterruptedBeforeLoadError:
        return Text("interrupted before the load began"), INTERRUPTED_STATUS
    notes = list(session.notes)
    if num_left := len(stages) - len(results):
        notes.append(f"interrupted: {num_left} of {len(stages)} stages have no results")
    with without_interruption():
        shown = render_run(results, slo, session.target, notes) if results else _nothing_measured(len(stages))
        if output.json_file is not None:
            document = serve_document(
                target, workload, load, slo, session.target, notes, results, with_samples=output.with_samples
            )
            write_report(document, output.json_file, shown, console)
    if num_left or any(result.run.is_interrupted for result in results):
        return shown, INTERRUPTED_STATUS
    return shown, 0 if any(result.num_measured > result.num_failed for result in results) else 1


def _nothing_measured(num_stages: int) -> Text:
    stages = "the only stage" if num_stages == 1 else f"the first of {num_stages} stages"
    return Text(f"interrupted before {stages} had a result: nothing was measured")


async def _measure(
    target: TargetSettings,
    workload: WorkloadSettings,
    plan: WorkloadPlan,
    stages: Sequence[Stage],
    slo: Slo | None,
    console: Console,
) -> tuple[list[StageResult], Session]:
    results: list[StageResult] = []

    with stop_on_signals() as stop:
        async with open_session(target, workload, plan, console, stop) as session:
            for stage in stages:
                if stop.is_set():
                    break
                run = StageRun(stage)
                await session.run(run, stop)
                result = evaluate(run, slo)
                if result.num_measured or not run.is_interrupted:
                    results.append(result)
    return results, session
