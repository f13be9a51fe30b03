"""``baton bench serve``: puts load on an endpoint, stage after stage, and reports what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console, RenderableType
from rich.text import Text

from baton.bench.assembly import WorkloadPlan, plan_workload
from baton.bench.document import check_writable, serve_document, write_json
from baton.bench.open_files import make_room_for_connections
from baton.bench.progress import show_progress
from baton.bench.runner import StageRun
from baton.bench.session import (
    InterruptedBeforeLoadError,
    Session,
    open_session,
    stop_on_signals,
    without_interruption,
)
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.slo import Slo, parse_slo
from baton.bench.stage_result import StageResult, evaluate
from baton.bench.stages import LoadSettings, Stage, plan_notes, plan_stages
from baton.bench.tables import render_run
from baton.bench.unused_options import check_all_used
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """
    Attributes:
        slo: see :func:`baton.bench.slo.parse_slo`; None without one.
        json_file: where the whole report goes.
        with_samples: every request stands in it, too.
    """

    slo: str | None = None
    json_file: Path | None = None
    with_samples: bool = False


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """
    Attributes:
        shown: tables for the terminal.
        stages: those that ran; the interrupted one, too, if it measured anything.
        is_interrupted: a signal ended the run before all stages were over.
    """

    shown: RenderableType
    stages: Sequence[StageResult]
    is_interrupted: bool

    @property
    def num_answered(self) -> int:
        return sum(stage.num_measured - stage.num_failed for stage in self.stages)


def run_serve(
    target: TargetSettings,
    workload: WorkloadSettings,
    load: LoadSettings,
    output: OutputSettings,
    console: Console,
) -> ServeOutcome:
    """Runs all stages. Progress goes to ``console``; what is wrong with the options is found before anything is sent.

    Raises:
        BatonError: options that do not go together, an endpoint that does not answer, or a file that cannot be written;
            then the tables are shown on ``console``.
    """
    slo = None if output.slo is None else parse_slo("--slo", output.slo)
    if output.with_samples and output.json_file is None:
        raise ConfigError("--samples writes every request into the file of --json. Name that file, or leave it out.")
    if output.json_file is not None:
        check_writable("--json", output.json_file)
    plan = plan_workload(workload)
    stages = plan_stages(load, plan.trace_length)
    check_all_used(workload, load, is_open=stages[0].is_open)
    make_room_for_connections(stages)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results, session = runner.run(_measure(target, workload, plan, stages, slo, console))
    except InterruptedBeforeLoadError:
        return ServeOutcome(Text("interrupted before the load began"), (), is_interrupted=True)
    notes = [*plan_notes(load, plan.trace_length), *session.notes]
    if num_left := len(stages) - len(results):
        notes.append(f"interrupted: {num_left} of {len(stages)} stages have no figures")
    with without_interruption():
        shown = render_run(results, slo, session.target, notes) if results else _nothing_measured(len(stages))
        try:
            if output.json_file is not None:
                document = serve_document(
                    target, workload, load, slo, session.target, notes, results, with_samples=output.with_samples
                )
                write_json(document, output.json_file)
        except OSError as error:
            console.print(shown)
            raise ConfigError(
                f"A report cannot be written: {error}. The tables above are what was measured."
            ) from error
    if output.json_file is not None:
        console.print(Text(f"wrote {output.json_file}"), soft_wrap=True)
    is_interrupted = num_left > 0 or any(result.run.is_interrupted for result in results)
    return ServeOutcome(shown, results, is_interrupted)


def _nothing_measured(num_stages: int) -> Text:
    stages = "the only stage" if num_stages == 1 else f"the first of {num_stages} stages"
    return Text(f"interrupted before {stages} had a figure: nothing was measured")


async def _measure(
    target: TargetSettings,
    workload: WorkloadSettings,
    plan: WorkloadPlan,
    stages: Sequence[Stage],
    slo: Slo | None,
    console: Console,
) -> tuple[list[StageResult], Session]:
    results: list[StageResult] = []

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    with stop_on_signals() as stop:
        async with open_session(target, workload, plan, say, stop) as session:
            for stage in stages:
                if stop.is_set():
                    break
                run = StageRun(stage)
                async with show_progress(run, console):
                    await session.run(run, stop)
                result = evaluate(run, slo)
                if result.num_measured or not run.is_interrupted:
                    results.append(result)
    return results, session
