"""``baton simulate``: reads options. The simulation is imported when the command runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.cli.cli_reporter import print_report
from cluster.config.config_reading import parse_override

_MODULE = "cluster.simulation.entry"


def simulate(
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Mooncake JSONL or Azure CSV.")] = None,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML file, such as deploy/simulated-64.yaml.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value, e.g. decode.workers=8.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="What workers take, instead of simulation.profile: a name or a YAML file.")
    ] = None,
    router: Annotated[
        str, typer.Option(help="baton: as configured; round_robin: in turn, with neither local prefill nor admission.")
    ] = "baton",
    rate_scale: Annotated[
        str,
        typer.Option(help="How many times as fast as recorded: 2, or by virtual time: 0=1,600=4,1200=1."),
    ] = "1",
    input_scale: Annotated[str, typer.Option(help="Factor of prompt lengths, in the same way.")] = "1",
    output_scale: Annotated[str, typer.Option(help="Factor of answer lengths, in the same way.")] = "1",
    requests: Annotated[int | None, typer.Option(min=1, help="How many. Default: all of the trace.")] = None,
    trace_format: Annotated[str, typer.Option(help="auto, mooncake or azure.")] = "auto",
    trace_start_s: Annotated[
        float, typer.Option("--trace-start", min=0, help="Seconds of the trace to leave out.")
    ] = 0,
    trace_seconds: Annotated[float | None, typer.Option(help="How much of the trace is used. Default: all.")] = None,
    slo_class: Annotated[
        str, typer.Option("--class", help="SLO class of the requests, or shares: interactive=1,batch=3.")
    ] = "",
    warmup_s: Annotated[float, typer.Option("--warmup", min=0, help="Virtual seconds that are left out.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and classes.")] = 0,
    compare_with: Annotated[
        Path | None,
        typer.Option(metavar="REPORT.json", help="Print the error against a report of `baton bench serve --json`."),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Which stage of that report.")] = None,
    fit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only write a profile with the step costs of real workers, as learned here."),
    ] = None,
    with_samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Write every request into the JSON, too.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Everything, with all settings.")
    ] = None,
) -> None:
    """Replay traffic against the real router and simulated workers, in virtual time."""
    entry: Any = _load()
    options = {
        "trace": trace,
        "config": config,
        "overrides": dict(parse_override(text) for text in assignments or []),
        "profile": profile,
        "router": router,
        "rate_scale": rate_scale,
        "input_scale": input_scale,
        "output_scale": output_scale,
        "with_samples": with_samples,
        "requests": requests,
        "trace_format": trace_format,
        "trace_start_s": trace_start_s,
        "trace_seconds": trace_seconds,
        "slo_class": slo_class,
        "warmup_s": warmup_s,
        "seed": seed,
        "compare_with": compare_with,
        "stage": stage,
        "json_file": json_file,
    }
    if fit is not None:
        sys.stdout.write(entry.fit_profile(options, fit))
        return
    errors = Console(stderr=True)
    shown = entry.simulate(options, lambda line: errors.print(line, markup=False))
    print_report(shown)


def _load() -> Any:
    return importlib.import_module(_MODULE)
