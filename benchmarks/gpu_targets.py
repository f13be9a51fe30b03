"""What steps reach of a GPU's bandwidth and matrix rate: ``python -m benchmarks.gpu_targets [--help]``.

A model of random weights in the shape of a real one, as a decode and a prefill worker run it, beside what this device
reads and multiplies in the same run, and beside the continuous batching of transformers. Five figures, each with what
it should be. On a CPU the same is computed, with the backends that there are; the targets are meant for GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.argument_types import HelpFormatter, at_least
from benchmarks.ceilings import Ceilings, measure_ceilings, median_ratio
from benchmarks.engine_steps import Case, Work, step_of, write_everywhere
from benchmarks.offline import baton_engine, transformers_continuous_engine
from benchmarks.offline.protocol import Generate
from benchmarks.turns import in_turn
from engine.model_loader import pick_device, prepare_model
from engine.model_runner import ModelRunner

_BLOCK_SIZE = 16
_SEED = 0
_PROMPT_TOKENS = 128
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        context: tokens before a step that decodes or verifies.
        batch: sequences that decode together.
        prefill: tokens of a prompt in one step.
        verify: tokens of a chain that is verified in one step.
        output: tokens that each of ``batch`` requests gets beside transformers.
    """

    context: int = 1024
    batch: int = 64
    prefill: int = 8192
    verify: int = 8
    output: int = 128

    @property
    def num_blocks(self) -> int:
        """With room for each of the works alone."""
        lengths = (self.context + 1, _PROMPT_TOKENS + self.output + 1)
        together = max(self.batch * -(-length // _BLOCK_SIZE) for length in lengths)
        alone = max(-(-length // _BLOCK_SIZE) for length in (self.prefill, self.context + self.verify))
        return 1 + max(together, alone)


@dataclass(frozen=True, slots=True)
class Figure:
    """
    Attributes:
        is_most: the target is the most that it may be, else the least.
        note: what it was made of.
    """

    name: str
    value: float
    target: float
    is_most: bool
    note: str

    @property
    def is_met(self) -> bool:
        return self.value <= self.target if self.is_most else self.value >= self.target


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, the same ones each time on the same device."""
    torch.manual_seed(_SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=dtype)
    return model.to(dtype).eval()


def measure_steps(runner: ModelRunner, ceilings: Ceilings, plan: Plan, repeats: int) -> list[Figure]:
    """Of single steps, from planning to tokens on the host."""
    work = Work(runner.loaded, runner.spec.bytes_per_token)
    lone, many = Case(1, 1, plan.context), Case(plan.batch, 1, plan.context)
    prompt, chain = Case(1, plan.prefill, 0), Case(1, plan.verify, plan.context)
    figures = []
    for case, of, target in ((lone, "bandwidth", 0.85), (many, "bandwidth", 0.70), (prompt, "matrix rate", 0.60)):
        ms = statistics.median(in_turn({"": step_of(case, runner)}, repeats)[""])
        share = work.least_ms(case, ceilings) / ms
        num_tokens = case.batch * case.tokens
        note = f"{ms:.2f} ms, {num_tokens / ms * 1e3:,.0f} tokens/s"
        figures.append(Figure(f"{case.name}: share of the {of}", share, target, False, note))
    times = in_turn({"chain": step_of(chain, runner), "lone": step_of(lone, runner)}, repeats)
    note = f"{statistics.median(times['chain']):.2f} ms against {statistics.median(times['lone']):.2f}"
    ratio = median_ratio(times["chain"], times["lone"])
    return [*figures, Figure(f"{chain.name}, cost against one token", ratio, 1.1, True, note)]


def measure_beside(engines: Mapping[str, Generate], plan: Plan, rounds: int, vocab_size: int) -> Figure:
    """The first engine against the second, in turn, each request's prompt included."""
    rng = random.Random(_SEED)
    steps: dict[str, Callable[[], float]] = {}
    for name, generate in engines.items():

        def step(generate: Generate = generate) -> float:
            prompts = [[rng.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)] for _ in range(plan.batch)]
            started_s = time.perf_counter()
            counts = generate(prompts, plan.output)
            if counts != [plan.output] * plan.batch:
                raise RuntimeError(f"{counts} tokens came where {plan.output} were asked for")
            return (time.perf_counter() - started_s) * 1e3

        steps[name] = step
    times = in_turn(steps, rounds)
    ours, theirs = times
    num_tokens = plan.batch * plan.output
    rates = [num_tokens / statistics.median(times[name]) * 1e3 for name in (ours, theirs)]
    note = f"{rates[0]:,.0f} against {rates[1]:,.0f} output tokens/s"
    name = f"{plan.batch} requests of {_PROMPT_TOKENS} tokens, {plan.output} out: {ours} × {theirs}"
    return Figure(name, median_ratio(times[theirs], times[ours]), 1.0, False, note)


def show(figures: list[Figure], title: str) -> Table:
    """A row for each."""
    table = Table("figure", "value", "target", "", "made of", title=title)
    for figure in figures:
        sign = "≤" if figure.is_most else "≥"
        verdict = "met" if figure.is_met else "short"
        table.add_row(figure.name, f"{figure.value:.2f}", f"{sign} {figure.target:.2f}", verdict, figure.note)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    plan = Plan()
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of the model")
    parser.add_argument("--device", default="auto", help="as in the configuration")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the model")
    parser.add_argument("--context", type=at_least(1), default=plan.context, help="tokens before a step")
    parser.add_argument("--batch", type=at_least(2), default=plan.batch, help="sequences that decode together")
    parser.add_argument("--prefill", type=at_least(2), default=plan.prefill, help="tokens of a prompt in one step")
    parser.add_argument("--verify", type=at_least(2), default=plan.verify, help="tokens of a chain in one step")
    parser.add_argument("--output", type=at_least(2), default=plan.output, help="tokens of a request")
    parser.add_argument("--repeats", type=at_least(1), default=15, help="of each step, of which the median is told")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="beside transformers")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    plan = Plan(arguments.context, arguments.batch, arguments.prefill, arguments.verify, arguments.output)
    longest = max(plan.prefill, plan.context + plan.verify, _PROMPT_TOKENS + plan.output)
    most = SHAPES[arguments.shape]["max_position_embeddings"]
    if longest > most:
        parser.error(f"a sequence of {longest} tokens was asked for, but this shape takes {most} at most.")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json is {arguments.json}, but there is no folder {arguments.json.parent}.")
    device, dtype = pick_device(arguments.device), getattr(torch, arguments.dtype)
    console = Console(width=120)
    console.print(f"making {arguments.shape} of random weights, {arguments.dtype}, on {device}")
    loaded = prepare_model(make_model(arguments.shape, device, dtype), arguments.dtype)
    ceilings = measure_ceilings(dtype, device)
    console.print(
        f"it reads {ceilings.bytes_per_second / 1e9:,.1f} GB/s and multiplies "
        f"{ceilings.flops_per_second / 1e12:,.1f} TFLOP/s of {ceilings.multiplied}; compiling and recording steps"
    )
    runner = ModelRunner(loaded, plan.num_blocks, _BLOCK_SIZE)
    write_everywhere(runner.cache)
    runner.capture_graphs(plan.batch, plan.verify - 1, max(plan.context + 1, _PROMPT_TOKENS + plan.output + 1))
    console.print("measuring steps")
    figures = measure_steps(runner, ceilings, plan, arguments.repeats)
    console.print("measuring beside transformers")
    most_tokens = _PROMPT_TOKENS + plan.output + 1
    engines = {
        "baton": baton_engine.generate_by(runner, most_tokens, plan.batch),
        "transformers": transformers_continuous_engine.generate_by(
            make_model(arguments.shape, device, dtype), most_tokens, plan.batch
        ),
    }
    figures.append(measure_beside(engines, plan, arguments.rounds, loaded.vocab_size))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    console.print(show(figures, f"{arguments.shape}, {arguments.dtype}, {name}"))
    if arguments.json:
        report = {"device": name, "ceilings": asdict(ceilings), "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
