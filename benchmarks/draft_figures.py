"""Do the figures that a worker reports of its drafts explain its speed-up? ``python -m benchmarks.draft_figures``.

Runs cells of ``benchmarks.speculation``, and computes the speed-up a second time as the page and ``baton advise`` do:
from the acceptance by position and the cost at the size of the batch, for the mean length of the drafts and
the share of rounds that have one. Drafts are chains, as in the formula.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from baton.core.figure_table import figure_table
from baton.core.option_text import names_if_given
from baton.core.speculation_rates import size_class
from baton.process.worker_environment import become_like_a_worker
from baton.rpc.wire import worker_pb2
from benchmarks.options import overrides_of, run_command
from benchmarks.speculation_runs import Cell, measure
from benchmarks.speculation_target import EngineFactory, load_target
from benchmarks.speculation_workloads import load_workloads
from cluster.cli.cli_reporter import Reporter, print_report
from cluster.config.config import BatonConfig, load_config
from cluster.telemetry.draft_curves import measured_acceptance
from decode_worker.draft_reports import fill_speculation
from decode_worker.speculation.controller import SpeculationController


def predicted_speedup(controller: SpeculationController, method: str, batch: int, share: float = 1.0) -> float | None:
    """The speed-up by the reported figures of ``method`` for drafts of the mean length; ``None`` without figures.

    Args:
        share: of the rounds that have a draft; the others are plain steps.
    """
    stats = worker_pb2.WorkerStats()
    fill_speculation(stats, controller, 0.0)
    entry = next((entry for entry in stats.methods if entry.method == method), None)
    cost = next((cost for cost in entry.costs if cost.size_class == size_class(batch)), None) if entry else None
    if entry is None or cost is None or not entry.recent_acceptance:
        return None
    acceptance, length = measured_acceptance(entry), entry.recent_length
    shorter, longer = (acceptance.expected_tokens(int(length) + more) for more in (0, 1))
    tokens = shorter + (longer - shorter) * (length - int(length))
    return (1.0 + share * (tokens - 1.0)) / (1.0 + share * (cost.drafting + cost.verifying) * length)


def compare(
    config: BatonConfig,
    report: Reporter,
    methods: Sequence[str],
    workloads: Sequence[str],
    *,
    batch: int,
    pairs: int,
    tokens: int,
) -> RenderableType:
    """A row for each method and workload."""
    target = load_target(config)
    loaded = load_workloads(workloads, {}, target.tokenizer)
    longest = max(len(prompt) for workload in loaded for prompt in workload.prompts)
    factory = EngineFactory(target, batch, longest, tokens)
    table = figure_table(
        "method", "workload", "pairs", "speed-up", "lowest", "highest", "drafted", "by figures", num_left=2
    )
    for method in methods:
        for workload in loaded:
            report(f"{method}, {workload.name}")
            own = factory.speculative(method)  # its figures are those of this row alone
            cell = Cell(method, workload.name, 0.0, batch)
            batches = [workload.take(index * batch, batch) for index in range(pairs)]
            result = measure(cell, factory.plain(), own.engine, own.meter, batches, tokens, target.loaded.eos_token_ids)
            share = result.tally.by_method[method] / result.tally.num_rounds
            predicted = predicted_speedup(own.controller, method, batch, share)
            gains = (result.speedup, min(result.speedups), max(result.speedups))
            shown = "-" if predicted is None else f"{predicted:.2f}"
            row = [str(len(result.speedups)), *(f"{gain:.2f}" for gain in gains), f"{share:.0%}", shown]
            table.add_row(method, workload.name, *row)
    return table


def command(
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the configuration.")
    ] = None,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML configuration file.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, such as eagle3,suffix.")] = "eagle3,suffix",
    workloads: Annotated[str, typer.Option(help="Workloads, such as chat,summarise.")] = "chat,summarise",
    batch: Annotated[int, typer.Option(help="Concurrent sequences.")] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Runs with and without speculation of each row.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 128,
) -> None:
    """Compare measured speed-ups with those that a worker's figures predict."""
    become_like_a_worker()
    with Reporter() as report:
        shown = compare(
            load_config(config, overrides_of(assignments, speculation__tree_max_batch=0)),
            report,
            names_if_given("--methods", methods),
            names_if_given("--workloads", workloads),
            batch=batch,
            pairs=pairs,
            tokens=max_tokens,
        )
    print_report(shown)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.draft_figures"))
