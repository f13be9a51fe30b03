"""What each speculation method is worth, by workload, temperature and batch: ``python -m benchmarks.speculation``.

One process and one engine step at a time, prefill and decode together, without Ray: what is measured is decoding.
Every cell of the table computes the same requests without and with speculation, a few steps of either in turn, so that
both see the same machine. TPOT counts from when every request of a run has its first token.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from baton.bench.document import check_writable
from baton.core.errors import ConfigError
from baton.core.option_text import integers, names_if_given, numbers
from baton.engine.engine import Engine
from baton.process.garbage import rare_collections
from baton.process.worker_environment import become_like_a_worker
from benchmarks.options import overrides_of, run_command
from benchmarks.speculation_report import SpeculationReport
from benchmarks.speculation_runs import Cell, CellResult, measure
from benchmarks.speculation_target import EngineFactory, SpeculativeEngine, Target, load_target
from benchmarks.speculation_workloads import KINDS, WORKLOADS, Workload, check_names, load_workloads, parse_prompt_files
from cluster.cli.cli_reporter import Reporter, print_report
from cluster.config.config import BatonConfig, load_config
from decode_worker.speculation.controller import NONE
from decode_worker.speculation.registry import method_names

JSON_NAME = "speculation.json"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The settings of the benchmark.

    Attributes:
        methods: names of methods; empty means every method that can run.
        workloads: names of workloads; empty means the built-in ones and those of ``prompts``.
        prompts: ``NAME=FILE``, see :func:`benchmarks.speculation_workloads.parse_prompt_files`.
        max_tokens: maximum length of each answer.
        rounds: pairs of runs of each cell. Every pair has different prompts, if there are enough.
        requests: minimum number of requests of each cell; small batches get more rounds, since prompts differ more
            than runs.
        cold: begin each cell with what a worker knows when it has just started.
        out: folder of the JSON report.

    Raises:
        ConfigError: a value is out of its range, or a name is unknown.
    """

    methods: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.8)
    batches: tuple[int, ...] = (1, 4, 16)
    max_tokens: int = 256
    rounds: int = 3
    requests: int = 8
    cold: bool = False
    out: Path = Path("out")

    def __post_init__(self) -> None:
        check_names("speculation method", self.methods, method_names())
        check_names("workload", self.workloads, tuple(dict.fromkeys([*KINDS, *self.known_workloads])))
        for name, values in (("--batches", self.batches), ("--temperatures", self.temperatures)):
            if not values:
                raise ConfigError(f"{name} needs at least one number.")
        if self.methods and set(self.methods) <= {NONE}:
            raise ConfigError(
                "--methods none would measure plain decoding against itself. Give a method that drafts, such as auto."
            )
        if min(self.batches) < 1 or self.rounds < 1 or self.requests < 1:
            raise ConfigError("--batches, --rounds and --requests must be at least 1.")
        if self.max_tokens < 2:
            raise ConfigError("--max-tokens must be at least 2: the first token is the prefill's.")
        if not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise ConfigError("--temperatures must be between 0 and 100.")

    @property
    def known_workloads(self) -> tuple[str, ...]:
        """The workloads that are measured if none is named."""
        return tuple(dict.fromkeys([*WORKLOADS, *parse_prompt_files(self.prompts)]))

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        return {**asdict(self), "out": str(self.out)}


def run(config: BatonConfig, report: Report, **settings: Any) -> RenderableType:
    """Measures every cell, and rewrites the JSON report after each of them.

    Args:
        config: the model, the draft and the speculation settings; pools and router are ignored.
        report: called with lines of progress.
        settings: attributes of :class:`SpeculationSettings`.

    Returns:
        The tables to show.

    Raises:
        BatonError: settings, model, draft or prompts cannot be used; the message says why.
    """
    wanted = SpeculationSettings(**settings)
    largest, most = max(wanted.batches), config.decode.max_num_seqs
    if largest > most:
        raise ConfigError(
            f"--batches has {largest}, but an engine runs at most {most} sequences at once (decode.max_num_seqs). "
            f"Give smaller ones, or add --set decode.max_num_seqs={largest}."
        )
    check_writable("--out", wanted.out / JSON_NAME)
    report(f"loading {config.model}")
    target = load_target(config)
    names = wanted.workloads or wanted.known_workloads
    workloads = load_workloads(names, parse_prompt_files(wanted.prompts), target.tokenizer)
    with rare_collections():  # as on a worker
        found = run_on(target, workloads, wanted, report)
    return Group(found.render(), Text(f"report: {wanted.out / JSON_NAME}"))


def run_on(
    target: Target, workloads: Sequence[Workload], settings: SpeculationSettings, report: Report
) -> SpeculationReport:
    """The same with a loaded model."""
    longest = max(len(prompt) for workload in workloads for prompt in workload.prompts)
    factory = EngineFactory(target, max(settings.batches), longest, settings.max_tokens)
    engines, left_out = factory.choose_methods(settings.methods)
    plain = factory.plain()
    if settings.cold:
        # Everything is in the caches of the processor, and nothing is known to the engines of the runs.
        next(iter(engines.values())).profile()
    found = SpeculationReport(_environment(target), settings.to_dict(), left_out)
    cells = list(product(workloads, settings.temperatures, settings.batches, engines.items()))
    for number, (workload, temperature, batch, (method, engine)) in enumerate(cells, start=1):
        cell = Cell(method, workload.name, temperature, batch)
        report(f"{number} of {len(cells)}: {cell}")
        try:
            if settings.cold:
                engine = factory.speculative(method)
                engine.profile()
            result = _measure(cell, plain, engine, workload, settings, target.loaded.eos_token_ids)
        except KeyboardInterrupt:
            kept = f"; {settings.out / JSON_NAME} has the earlier cells" if found.results else ""
            report(f"stopped in cell {number} of {len(cells)}{kept}")
            raise
        found.results.append(result)
        found.write(settings.out / JSON_NAME)
        report(f"{number} of {len(cells)}: {cell}: tau {result.tally.tau:.2f}, speed-up {result.speedup:.2f}")
    return found


def _measure(
    cell: Cell,
    plain: Engine,
    speculative: SpeculativeEngine,
    workload: Workload,
    settings: SpeculationSettings,
    eos_token_ids: frozenset[int],
) -> CellResult:
    rounds = max(settings.rounds, -(-settings.requests // cell.batch))
    batches = [workload.take(index * cell.batch, cell.batch) for index in range(rounds)]
    result = measure(
        cell,
        plain,
        speculative.engine,
        speculative.meter,
        batches,
        settings.max_tokens,
        eos_token_ids,
        is_cold=settings.cold,
    )
    result.num_failures = speculative.controller.num_failures
    return result


def _environment(target: Target) -> dict[str, Any]:
    config, device, draft = target.config, target.loaded.model.device, target.draft
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model,
        "draft": None if draft is None else {"name": draft.name, "method": draft.method},
        "dtype": target.loaded.dtype_name,
        "acceptance": config.speculation.acceptance,
        "speculation": config.speculation.model_dump(mode="json"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load_average_before": list(os.getloadavg()),
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("baton-serve", "torch", "transformers")},
        },
    }


def command(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML configuration file, as for `baton up`.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the configuration.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same as --set model=...")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="The same as --set speculation.draft=...: auto, none, a bundled one, a folder or a hub id."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The same as --set dtype=... With float32, tokens must be equal.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="The same as --set engine.threads=...")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, such as auto,ngram. Default: all that can run with this draft.")
    ] = None,
    workloads: Annotated[
        str | None,
        typer.Option(
            help=f"Workloads among {','.join(KINDS)} and those of --prompts. Default: the first four, and --prompts."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help='Adds or replaces a workload: JSONL file of {"prompt": ...}.'),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; 0 is greedy.")] = "0,0.8",
    batches: Annotated[str, typer.Option(help="Numbers of concurrent sequences.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 256,
    rounds: Annotated[int, typer.Option(help="Runs with and without speculation, after one warm-up run.")] = 3,
    requests: Annotated[
        int, typer.Option(help="Minimum number of requests per cell; small batches get more rounds.")
    ] = 8,
    cold: Annotated[
        bool, typer.Option(help="Begin each cell with what a worker knows when it has just started, its profile.")
    ] = False,
    out: Annotated[Path, typer.Option("-o", "--out", help="Output folder of speculation.json.")] = Path("out"),
) -> None:
    """Measure every speculation method against plain decoding: accepted lengths, milliseconds, TPOT.

    Loads the model into this process, without Ray, and wants the machine for itself. Everything at its default takes
    some four hours on a small CPU, with --methods auto half an hour; the JSON report is there after the first cell, and
    grows.
    """
    become_like_a_worker()
    overrides = overrides_of(assignments, model=model, speculation__draft=draft, dtype=dtype, engine__threads=threads)
    with Reporter() as report:
        settings = {
            "methods": names_if_given("--methods", methods), "workloads": names_if_given("--workloads", workloads),
            "prompts": tuple(prompts or ()), "temperatures": numbers("--temperatures", temperatures),
            "batches": integers("--batches", batches), "max_tokens": max_tokens, "rounds": rounds,
            "requests": requests, "cold": cold, "out": out,
        }  # fmt: skip
        shown = run(load_config(config, overrides), report, **settings)
    print_report(shown)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.speculation"))
