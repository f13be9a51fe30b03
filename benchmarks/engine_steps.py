"""The cost of one engine step, compared with the machine's limit: ``python -m benchmarks.engine_steps [--help]``.

Every case is computed by each decoder in turn (A B A B), so that a machine that slows down slows both. Times are
medians, ratios are medians of neighbouring runs. The limit of a step is the longer of two times: reading its weights
and KV once at the bandwidth that was measured in the same run, and computing its products at the matrix rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.core.drafts import ROOT, Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import DECODERS, FUSED_WEIGHTS, KV_CACHES, RunnerOptions
from baton.engine.runner.served_model import load_served_model
from baton.process.cores import usable_cores
from baton.process.worker_environment import become_like_a_worker
from benchmarks.ceilings import Ceilings, in_turn, measure_ceilings, median_ratio
from benchmarks.options import HelpFormatter, at_least

_BLOCK_SIZE = 16
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Case:
    """A step of ``batch`` sequences, each with ``tokens`` new tokens after ``context`` others.

    Attributes:
        tree: whether all tokens except the first are the nodes of a tree.
    """

    batch: int
    tokens: int
    context: int
    tree: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        if self.context == 0:
            return f"prefill {self.tokens}"
        kind = "decode" if self.tokens == 1 else f"tree of {self.tokens}" if self.tree else f"verify {self.tokens}"
        return f"{kind}, batch {self.batch}, context {self.context}"


@dataclass(slots=True)
class Result:
    """The measurements of one case.

    Attributes:
        least_ms: the lower limit that the machine's ceilings give.
        times_ms: durations by decoder and run.
    """

    case: Case
    least_ms: float
    times_ms: dict[str, list[float]] = field(default_factory=dict)

    def ms(self, decoder: str) -> float:
        """The median duration with a decoder, in milliseconds."""
        return statistics.median(self.times_ms[decoder])


class Work:
    """How much a step must read and compute.

    Args:
        weights: the weight format of the runner for which the limit is computed.
    """

    def __init__(self, loaded: LoadedModel, kv_bytes_per_token: int, weights: str = "native") -> None:
        model: Any = loaded.model
        head = model.get_output_embeddings().weight
        tensors = [*model.get_decoder().layers.parameters(), *model.get_decoder().layers.buffers()]  # fp8 are buffers
        layers = sum(tensor.numel() for tensor in tensors)
        sizes = sum(tensor.nbytes for tensor in tensors) / layers, head.element_size()
        # int4 has a scale and a minimum per 32 weights, and an int8 head.
        self._layer_item, self._head_item = {"int8": (1.0, 1.0), "int4": (0.625, 1.0)}.get(weights, sizes)
        self._head, self._layers, self._kv_bytes = head.numel(), layers, kv_bytes_per_token
        config = model.config.get_text_config(decoder=True)
        head_dim = loaded.attention_layers[0].spec.key_dim
        self._attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim

    def least_ms(self, case: Case, ceilings: Ceilings) -> float:
        """The lower limit of a case's duration; see :meth:`Ceilings.least_ms`."""
        num_tokens = case.batch * case.tokens
        num_rows = case.batch * (case.tokens if case.context else 1)
        reads = self._layers * self._layer_item + self._head * self._head_item
        reads += case.batch * case.context * self._kv_bytes
        keys = case.context + case.tokens / 2
        flops = 2 * (self._layers * num_tokens + self._head * num_rows) + self._attention * keys * num_tokens
        return ceilings.least_ms(reads, flops)


def make_runners(
    loaded: LoadedModel,
    num_blocks: int,
    decoders: Sequence[str],
    weights: Sequence[str] = ("native",),
    kv_caches: Sequence[str] = ("native",),
) -> dict[str, ModelRunner]:
    """A runner for each combination of decoder, weights and cache; only the fused decoder supports non-native weights.

    Runners are named after the decoder, or after non-native weights, with ``+kv_int8`` for an int8 cache.
    """
    runners: dict[str, ModelRunner] = {}
    for kind, kv_cache, name in product(*map(dict.fromkeys, (weights, kv_caches, decoders))):
        if name == "transformers" and kind != "native":
            continue
        runner = ModelRunner(
            loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(decoder=name, weights=kind, kv_cache=kv_cache)
        )
        write_everywhere(runner.cache)
        computed_by = "fused" if runner.is_fused else "transformers"
        suffix = "" if kv_cache == "native" else f"+kv_{kv_cache}"
        runners.setdefault((computed_by if kind == "native" else kind) + suffix, runner)
    return runners


def write_everywhere(cache: PagedKVCache) -> None:
    """Writes to all pages: unwritten pages may share one physical page, which the CPU would read from its caches."""
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()


def make_plan(case: Case, num_blocks: int) -> list[ScheduledSequence]:
    """The plan of the step, with its own blocks."""
    blocks = BlockManager(num_blocks, _BLOCK_SIZE, prefix_caching=False)
    plan = []
    for index in range(case.batch):
        length = case.context + 1 if case.context else case.tokens
        request = Request(str(index), [7] * length, SamplingParams(max_tokens=case.tokens + 1))
        blocks.grow(request, case.context + case.tokens)
        request.num_computed_tokens = case.context
        if not case.context:
            plan.append(ScheduledSequence(request, case.tokens))
            continue
        size = case.tokens - 1
        # Each node has two children, as in trees of draft heads.
        parents = tuple(ROOT if node < 2 else node // 2 - 1 for node in range(size)) if case.tree else ()
        token_ids = tuple(5 + node % 2 for node in range(size)) if case.tree else (5,) * size
        plan.append(ScheduledSequence(request, 1, Draft(token_ids, parents)))
    return plan


def run_case(case: Case, runners: dict[str, ModelRunner], repeats: int, result: Result) -> None:
    """Fills in the times; the runners take turns."""
    steps = {name: step_of(case, runner) for name, runner in runners.items()}
    result.times_ms = in_turn(steps, repeats)


def step_of(case: Case, runner: ModelRunner) -> Callable[[], float]:
    """A function that runs the step and returns its milliseconds."""
    plan = make_plan(case, runner.cache.num_blocks)

    def step() -> float:
        started_s = time.perf_counter()
        runner.forward(runner.build_batch(plan)).argmax(-1).tolist()
        return (time.perf_counter() - started_s) * 1e3

    return step


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the options select."""
    decode = [Case(batch, 1, context) for context in arguments.contexts for batch in arguments.batches]
    verify = [Case(1, tokens, arguments.contexts[0]) for tokens in arguments.verify]
    trees = [Case(1, tokens, arguments.contexts[0], tree=True) for tokens in arguments.trees]
    return [*decode, *verify, *trees, *(Case(1, tokens, 0) for tokens in arguments.prefill)]


def show(results: Sequence[Result], decoders: Sequence[str], console: Console) -> None:
    """Prints a row for each case, in which the first decoder is compared with the others."""
    first = decoders[0]
    table = Table("step", "tokens/s", *(f"{name} ms" for name in decoders), "limit ms", "of limit")
    for other in decoders[1:]:
        table.add_column(f"× {other}")
    for result in results:
        case = result.case
        num_tokens = case.batch * case.tokens
        table.add_row(
            case.name,
            f"{num_tokens / result.ms(first) * 1e3:.0f}",
            *(f"{result.ms(name):.1f}" for name in decoders),
            f"{result.least_ms:.1f}",
            f"{result.least_ms / result.ms(first):.0%}",
            *(f"{median_ratio(result.times_ms[other], result.times_ms[first]):.2f}" for other in decoders[1:]),
        )
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="default", help="model, as in the configuration")
    parser.add_argument("--dtype", default="auto", help="data type, as in the configuration")
    parser.add_argument("--device", default="auto", help="device, as in the configuration")
    parser.add_argument(
        "--decoders", nargs="+", default=["auto", "transformers"], choices=DECODERS, help="decoders, measured in turn"
    )
    parser.add_argument(
        "--weights", nargs="+", default=["native"], choices=FUSED_WEIGHTS, help="weights of the fused decoder"
    )
    parser.add_argument(
        "--kv-caches", nargs="+", default=["native"], choices=KV_CACHES, help="encodings of the KV cache"
    )
    parser.add_argument(
        "--contexts", type=at_least(1), nargs="+", default=[128, 512, 2048], help="numbers of tokens before the step"
    )
    parser.add_argument(
        "--batches", type=at_least(1), nargs="+", default=[1, 8, 32], help="numbers of decoding sequences"
    )
    parser.add_argument(
        "--verify", type=at_least(2), nargs="*", default=[9], help="numbers of tokens of a chain to verify at batch 1"
    )
    parser.add_argument(
        "--trees", type=at_least(2), nargs="*", default=[17], help="numbers of tokens of a tree to verify at batch 1"
    )
    parser.add_argument(
        "--prefill", type=at_least(1), nargs="*", default=[1024], help="numbers of prompt tokens in one step"
    )
    parser.add_argument("--repeats", type=at_least(1), default=7, help="runs of each step; the median is shown")
    parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help="number of computing threads")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    become_like_a_worker()
    torch.set_num_threads(arguments.threads)
    loaded = load_served_model(resolve_model(arguments.model), arguments.dtype, pick_device(arguments.device))
    cases = cases_of(arguments)
    longest = max(case.context + case.tokens for case in cases)
    if longest > loaded.max_model_len:
        parser.error(
            f"a step needs {longest} tokens, but the model supports at most {loaded.max_model_len}; lower --contexts."
        )
    most = max(case.batch * -(-(case.context + case.tokens) // _BLOCK_SIZE) for case in cases)
    if set(arguments.decoders) == {"transformers"} and "native" not in arguments.weights:
        parser.error("--decoders transformers supports --weights native only")
    runners = make_runners(loaded, most, arguments.decoders, arguments.weights, arguments.kv_caches)
    ceilings = measure_ceilings(loaded.model.dtype, loaded.model.device)
    first = next(iter(runners.values()))
    work = Work(loaded, first.spec.bytes_per_token, first.spec.weights)
    console = Console(width=_WIDTH)
    console.print(
        f"{loaded.dtype_name}, {arguments.threads} threads; this machine reads "
        f"{ceilings.bytes_per_second / 1e9:.1f} GB/s and multiplies {ceilings.flops_per_second / 1e9:.0f} GFLOP/s "
        f"of {ceilings.multiplied}"
    )
    results = [Result(case, work.least_ms(case, ceilings)) for case in cases]
    for result in results:
        run_case(result.case, runners, arguments.repeats, result)
    show(results, list(runners), console)
    if arguments.json:
        report = {
            "ceilings": asdict(ceilings),
            "dtype": loaded.dtype_name,
            "steps": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
