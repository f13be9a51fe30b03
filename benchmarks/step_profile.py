"""Where the time of a decode step goes: ``python -m benchmarks.step_profile [--help]``.

The engine decodes a batch in this process: first undisturbed, then under cProfile, whose shares say what of a step is
the model's forward and what is scheduling, building the batch, sampling and the rest. ``--operations`` adds torch's own
profile of the forward, which sees inside the model's modules; a fused decoder is one compiled program to both.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import DECODERS, RunnerOptions
from baton.engine.runner.served_model import load_served_model
from baton.engine.sampling.verification import PlainSampling
from baton.engine.scheduling.scheduler import Scheduler
from baton.process.worker_environment import become_like_a_worker

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_WARM_UPS = 3
_WIDTH = 110
_PHASES: dict[str, Callable[..., Any]] = {
    "schedule": Scheduler.schedule,
    "build the batch": ModelRunner.build_batch,
    "forward": ModelRunner.forward,
    "sample": PlainSampling.verify,
    "post-process": Engine._post_process,
}


@dataclass(frozen=True, slots=True)
class Function:
    """Seconds in one Python function over all calls; ``own_s`` excludes callees."""

    name: str
    calls: int
    own_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a step.

    Attributes:
        undisturbed_ms: median duration of a step without the profiler.
        step_ms: mean duration under the profiler.
        shares: share of the profiled time by phase, with a sum of at most 1.
        functions: functions in descending order of their own time.
    """

    undisturbed_ms: float
    step_ms: float
    shares: dict[str, float]
    functions: tuple[Function, ...]

    @property
    def rest(self) -> float:
        """The share of a step that belongs to no phase."""
        return 1.0 - sum(self.shares.values())


def decoding_engine(runner: ModelRunner, batch: int, context: int, num_steps: int) -> Engine:
    """An engine that has computed ``batch`` prompts of ``context`` tokens and decodes for ``num_steps`` more steps."""
    most = _max_sequence_tokens(batch, context, num_steps)
    limits = SchedulerLimits(max(_CHUNK_TOKENS, 2 * batch), batch, most)
    blocks = BlockManager(runner.cache.num_blocks, _BLOCK_SIZE, prefix_caching=False)
    engine = Engine(runner, Scheduler(limits, blocks), PlainSampling())
    params = SamplingParams(max_tokens=most - context, temperature=0, ignore_eos=True)
    requests = [Request(str(index), [7] * context, params) for index in range(batch)]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(most):
        if all(request.output_token_ids for request in requests):
            return engine
        engine.step()
    raise RuntimeError("the prompts are not computed and never will be")


def blocks_needed(batch: int, context: int, num_steps: int) -> int:
    """The number of the cache's blocks for :func:`decoding_engine`."""
    return batch * (-(-_max_sequence_tokens(batch, context, num_steps) // _BLOCK_SIZE) + 1)


def _max_sequence_tokens(batch: int, context: int, num_steps: int) -> int:
    """The maximum length of a sequence: those with early prompts decode while other prompts are computed."""
    return context + num_steps + 2 + 2 * -(-batch * context // _CHUNK_TOKENS)


def profile_steps(engine: Engine, num_steps: int) -> Profile:
    """Profiles an engine over ``2 * num_steps`` steps."""
    times = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started_s) * 1e3)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        engine.step()
    profiler.disable()
    functions = {entry.code: entry for entry in profiler.getstats()}
    whole_s = functions[Engine.step.__code__].totaltime
    totals = {name: functions.get(_code(function)) for name, function in _PHASES.items()}
    shares = {name: entry.totaltime / whole_s for name, entry in totals.items() if entry is not None}
    found = [
        Function(_name(code), entry.callcount, entry.inlinetime, entry.totaltime) for code, entry in functions.items()
    ]
    found.sort(key=lambda function: function.own_s, reverse=True)
    return Profile(statistics.median(times), whole_s / num_steps * 1e3, shares, tuple(found))


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    return code


def _name(code: CodeType | str) -> str:
    """A function's file and qualified name; functions that are not Python have only a name."""
    if isinstance(code, str):
        return code
    return f"{'/'.join(code.co_filename.split('/')[-2:])} {code.co_qualname}"


def show(profile: Profile, num_steps: int, num_functions: int) -> list[Table]:
    """Tables of the phases, and of the functions with most time of their own."""
    phases = Table("phase", "share", "ms", title=f"a step: {profile.undisturbed_ms:.2f} ms undisturbed")
    for name, share in (*profile.shares.items(), ("the rest", profile.rest)):
        phases.add_row(name, f"{share:.1%}", f"{share * profile.step_ms:.3f}")
    functions = Table("function", "calls per step", "own ms", "with callees ms")
    for function in profile.functions[:num_functions]:
        functions.add_row(
            function.name,
            f"{function.calls / num_steps:.1f}",
            f"{function.own_s / num_steps * 1e3:.3f}",
            f"{function.total_s / num_steps * 1e3:.3f}",
        )
    return [phases, functions]


def operations_of(engine: Engine, num_steps: int, rows: int) -> str:
    """torch's table of the operations that took longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            engine.step()
    table: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)
    return table


def _run(arguments: argparse.Namespace, runner: ModelRunner, batch: int, console: Console) -> None:
    steps = arguments.steps
    num_steps = _WARM_UPS + (3 if arguments.operations else 2) * steps
    engine = decoding_engine(runner, batch, arguments.context, num_steps)
    for _ in range(_WARM_UPS):
        engine.step()
    kind = "fused" if runner.is_fused else "transformers"
    console.print(f"\n{kind} decoder, {batch} sequences after {arguments.context} tokens each, {steps} steps")
    for table in show(profile_steps(engine, steps), steps, arguments.functions):
        console.print(table)
    if arguments.operations:
        console.print(operations_of(engine, steps, arguments.functions), markup=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--decoder", default="auto", choices=DECODERS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences that decode")
    parser.add_argument("--context", type=int, default=256, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--functions", type=int, default=15, help="rows to show")
    parser.add_argument("--operations", action="store_true", help="torch's operations too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    become_like_a_worker()
    torch.set_num_threads(arguments.threads)
    loaded = load_served_model(
        resolve_model(arguments.model), arguments.dtype, pick_device(arguments.device), decoder=arguments.decoder
    )
    num_steps = _WARM_UPS + 3 * arguments.steps
    num_blocks = max(blocks_needed(batch, arguments.context, num_steps) for batch in arguments.batches)
    runner = ModelRunner(loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(decoder=arguments.decoder))
    for batch in arguments.batches:
        _run(arguments, runner, batch, Console(width=_WIDTH))


if __name__ == "__main__":
    main()
