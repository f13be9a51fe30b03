"""Where the time of the fused decoder's forward goes: ``python -m benchmarks.stage_profile [--help]``.

The program notes when each of its stages is done; a stage's time is the sum over all layers, the median of the repeats.
Rates are those of the stage's products, in which attention's are counted as far as keys can be seen.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.engine.cpu.tables import Stage
from baton.engine.models.model_loader import LoadedModel
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.forward_pass import FUSED_WEIGHTS
from baton.engine.runner.model_runner import KV_CACHES, ModelRunner
from baton.engine.runner.served_model import load_served_model
from baton.process.cores import usable_cores
from baton.process.worker_environment import become_like_a_worker
from benchmarks.engine_steps import Case, make_plan, write_everywhere

_BLOCK_SIZE = 16
_WARM_UPS = 2
_WIDTH = 110


def stage_times(runner: ModelRunner, case: Case, repeats: int) -> dict[Stage, float]:
    """Median milliseconds of each stage in steps like ``case``.

    Raises:
        ValueError: something else than the fused decoder computes the model.
    """
    clock = runner.watch_stages()
    if clock is None:
        raise ValueError("the model is not computed by the fused decoder, which alone has stages")
    batch = runner.build_batch(make_plan(case, runner.cache.num_blocks))
    times = []
    for _ in range(_WARM_UPS + repeats):
        runner.forward(batch)
        times.append(clock.stage_ms())
    return {stage: statistics.median(each[stage] for each in times[_WARM_UPS:]) for stage in times[0]}


def products_of(loaded: LoadedModel, case: Case) -> dict[Stage, float]:
    """Floating-point operations of the stages that multiply."""
    config: Any = loaded.model.config.get_text_config(decoder=True)
    spec = loaded.attention_layers[0].spec
    layers, hidden, tokens = config.num_hidden_layers, config.hidden_size, case.batch * case.tokens
    queries, kv = config.num_attention_heads * spec.key_dim, config.num_key_value_heads * spec.key_dim
    rows = tokens if case.context else case.batch
    keys = case.context + (case.tokens + 1) / 2
    return {
        Stage.PROJECT: 2.0 * layers * tokens * hidden * (queries + 2 * kv),
        Stage.ATTEND: 4.0 * layers * tokens * queries * keys,
        Stage.OUTPUT: 2.0 * layers * tokens * hidden * queries,
        Stage.GATE: 4.0 * layers * tokens * hidden * config.intermediate_size,
        Stage.DOWN: 2.0 * layers * tokens * hidden * config.intermediate_size,
        Stage.LOGITS: 2.0 * rows * hidden * config.vocab_size,
    }


def show(case: Case, times_ms: dict[Stage, float], products: dict[Stage, float]) -> Table:
    """One row for each stage."""
    total_ms = sum(times_ms.values())
    table = Table("stage", "ms", "share", "GFLOP/s", title=f"{case.name}: {total_ms:.2f} ms")
    for stage, ms in times_ms.items():
        rate = f"{products[stage] / ms / 1e6:.0f}" if stage in products and ms > 0 else ""
        table.add_row(stage.name.lower(), f"{ms:.3f}", f"{ms / total_ms:.1%}", rate)
    return table


def cases_of(arguments: argparse.Namespace) -> Sequence[Case]:
    """What the options ask for."""
    decode = [Case(batch, 1, arguments.context) for batch in arguments.batches]
    return [*decode, *(Case(1, tokens, 0) for tokens in arguments.prefill)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="native", choices=FUSED_WEIGHTS)
    parser.add_argument("--kv-cache", default="native", choices=KV_CACHES)
    parser.add_argument("--context", type=int, default=128, help="tokens before a step that decodes")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32], help="sequences that decode")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="tokens of a prompt in one step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    arguments = parser.parse_args()
    become_like_a_worker()
    torch.set_num_threads(arguments.threads)
    loaded = load_served_model(resolve_model(arguments.model), arguments.dtype, torch.device("cpu"))
    cases = cases_of(arguments)
    most = max(case.batch * -(-(case.context + case.tokens) // _BLOCK_SIZE) for case in cases)
    runner = ModelRunner(
        loaded, most, _BLOCK_SIZE, decoder="fused", weights=arguments.weights, kv_cache=arguments.kv_cache
    )
    write_everywhere(runner.cache)
    console = Console(width=_WIDTH)
    for case in cases:
        console.print(show(case, stage_times(runner, case, arguments.repeats), products_of(loaded, case)))


if __name__ == "__main__":
    main()
