"""What engine steps cost by attention backend, CUDA graphs and fp8 weights: ``python -m benchmarks.attention_steps``.

The variants take turns (A B A B) over the same steps, each with a copy of the model and a cache of its own. Without a
GPU there is one variant, ``torch_sdpa``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from baton.core.errors import ConfigError
from baton.engine.models.model_loader import load_model, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import KV_CACHES, ModelRunner
from benchmarks.ceilings import measure_ceilings
from benchmarks.engine_steps import Result, Work, cases_of, run_case, show

_BLOCK_SIZE = 16
_GRAPHS = "graphs"
_FP8 = "fp8"
VARIANTS = ("torch_sdpa", "triton_paged", "triton_paged+graphs", "triton_paged+graphs+fp8", "torch_sdpa+fp8")
_ON_CUDA = VARIANTS[:4]


def make_runner(
    variant: str, model: str, dtype: str, device: torch.device, num_blocks: int, kv_cache: str = "native"
) -> ModelRunner:
    """A runner of its own model.

    Raises:
        ConfigError: the variant cannot run here.
    """
    backend, *extras = variant.split("+")
    weights = _FP8 if _FP8 in extras else "native"
    loaded = load_model(resolve_model(model), dtype, device, weights)
    graphs = "auto" if _GRAPHS in extras else "off"
    return ModelRunner(
        loaded, num_blocks, _BLOCK_SIZE, backend, None, "transformers", weights, graphs, kv_cache=kv_cache
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all that run on the device")
    parser.add_argument("--kv-cache", default="native", choices=KV_CACHES, help="of every variant")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8192], help="tokens before the step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode")
    parser.add_argument("--verify", type=int, nargs="*", default=[9], help="tokens of a chain to verify at batch 1")
    parser.add_argument("--trees", type=int, nargs="*", default=[17], help="tokens of a tree to verify at batch 1")
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048], help="tokens of a prompt in one step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write all times here")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Raises :class:`ConfigError` for a variant that cannot run here."""
    arguments = _parser().parse_args(argv)
    device = pick_device(arguments.device)
    names = arguments.variants or (_ON_CUDA if device.type == "cuda" else VARIANTS[:1])
    recorded = [name for name in names if _GRAPHS in name.split("+")]
    if device.type != "cuda" and recorded:
        raise ConfigError(f"{recorded[0]} needs CUDA, but the device is {device.type}.")
    cases = cases_of(arguments)
    num_blocks = max(case.batch * -(-(case.context + case.tokens) // _BLOCK_SIZE) for case in cases)
    runners = {
        name: make_runner(name, arguments.model, arguments.dtype, device, num_blocks, arguments.kv_cache)
        for name in names
    }
    longest = max(case.context + case.tokens for case in cases)
    for runner in runners.values():
        runner.capture_graphs(max(arguments.batches), max([1, *arguments.verify, *arguments.trees]) - 1, longest)
    first = next(iter(runners.values()))
    loaded = first.loaded
    ceilings = measure_ceilings(loaded.model.dtype, device)
    work = Work(loaded, first.spec.bytes_per_token)
    results = [Result(case, work.least_ms(case, ceilings)) for case in cases]
    for result in results:
        run_case(result.case, runners, arguments.repeats, result)
    show(results, names, Console(width=120))
    if arguments.json:
        report = {"ceilings": asdict(ceilings), "dtype": loaded.dtype_name, "steps": [asdict(r) for r in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
