"""Engines without a server, side by side: ``python -m benchmarks.offline [--help]``.

Each engine is a process of its own, with the model loaded once and every core. They take turns job by job (A B B A), so
that a machine that slows down slows all of them, and ratios are medians of neighbouring jobs. All get the same prompts
of random tokens, never the same one twice, and must give exactly as many tokens as they are asked for. A step's time is
what the last tokens of a batch take: the answer of many tokens less the answer of one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.core.errors import BatonError
from baton.engine.models.model_source import resolve_model
from benchmarks.ceilings import median_ratio
from benchmarks.offline.processes import EngineProcess, started

ENGINES = ("baton", "baton-int8", "baton-int4", "transformers", "transformers-continuous", "vllm", "llama-cpp")
_FOREIGN = ("vllm", "llama-cpp")
_VOCABULARY = (1000, 30_000)
"""The range of token ids, which are ordinary tokens in every large enough model."""
_PACKAGE = "benchmarks.offline"


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests.

    Attributes:
        prompt_tokens: prompt tokens of each sequence.
        output_tokens: output tokens of each sequence after the first; 0 measures only the prompt.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"decode, batch {self.batch}" if self.output_tokens else f"prefill {self.prompt_tokens}"

    @property
    def num_tokens(self) -> int:
        """The number of measured tokens."""
        return self.batch * (self.output_tokens or self.prompt_tokens)

    def prompts(self, rng: random.Random) -> list[list[int]]:
        """New random prompts."""
        return [[rng.randrange(*_VOCABULARY) for _ in range(self.prompt_tokens)] for _ in range(self.batch)]

    def seconds(self, engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> float:
        """The measured seconds on an engine, for the prompts or for the tokens after the first."""
        first = engine.seconds(prompts, 1)
        return engine.seconds(prompts, 1 + self.output_tokens) - first if self.output_tokens else first


Times = dict[str, list[float]]
"""Seconds by engine and round."""


def run_rounds(case: Case, engines: Sequence[EngineProcess], rounds: int, seed: int) -> Times:
    """Measures a case on all engines in turn. The first round is a warm-up and does not count."""
    times: Times = {engine.name: [] for engine in engines}
    rng = random.Random(f"{case} {seed}")
    for number in range(rounds + 1):
        prompts = case.prompts(rng)
        for engine in engines if number % 2 else reversed(engines):
            seconds = case.seconds(engine, prompts)
            if number:
                times[engine.name].append(seconds)
    return times


def render(results: Sequence[tuple[Case, Times]]) -> Table:
    """A table with the tokens per second of each engine, and the speed of the first engine relative to the others."""
    names = list(results[0][1])
    ratios_of = [f"{names[0]} × {name}" for name in names[1:]]
    table = Table("tokens per second", *names, *ratios_of)
    for case, times in results:
        rates = [f"{case.num_tokens / statistics.median(times[name]):,.0f}" for name in names]
        ratios = [f"{median_ratio(times[name], times[names[0]]):.2f}" for name in names[1:]]
        table.add_row(case.name, *rates, *ratios)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--engines", nargs="+", default=["baton", "transformers"], choices=ENGINES)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="data type of every engine"
    )
    parser.add_argument("--vllm-python", type=Path, help="Python interpreter of an environment with vLLM")
    parser.add_argument("--llama-python", type=Path, help="Python interpreter of an environment with llama-cpp-python")
    parser.add_argument(
        "--llama-gguf", type=Path, help="the same model as a GGUF file, which determines the precision of llama-cpp"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32], help="numbers of decoding sequences")
    parser.add_argument("--context", type=int, default=128, help="number of prompt tokens of each sequence")
    parser.add_argument("--output", type=int, default=64, help="number of tokens that each sequence decodes")
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[1024], help="numbers of tokens of a prefilled prompt"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    return parser


def _command(name: str, folder: str | Path, cases: Sequence[Case], arguments: argparse.Namespace) -> list[str]:
    max_model_len = max(case.prompt_tokens + case.output_tokens + 1 for case in cases)
    given = [str(folder), arguments.dtype, str(max_model_len), str(max(case.batch for case in cases))]
    if name == "transformers":
        return [sys.executable, "-m", f"{_PACKAGE}.transformers_engine", *given[:2]]
    if name == "transformers-continuous":
        return [sys.executable, "-m", f"{_PACKAGE}.transformers_continuous_engine", *given]
    if name == "vllm":
        return [str(arguments.vllm_python), "-m", f"{_PACKAGE}.vllm_engine", *given]
    if name == "llama-cpp":
        file = str(arguments.llama_gguf.absolute())
        return [str(arguments.llama_python), "-m", f"{_PACKAGE}.llama_cpp_engine", file, str(max_model_len)]
    weights = name.partition("-")[2] or "native"
    return [sys.executable, "-m", f"{_PACKAGE}.baton_engine", *given, weights]


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    cases = [Case(batch, arguments.context, arguments.output) for batch in arguments.batches]
    cases += [Case(1, tokens, 0) for tokens in arguments.prefill]
    if (
        not cases
        or arguments.rounds < 1
        or min((arguments.context, arguments.output, *arguments.batches, *arguments.prefill)) < 1
    ):
        parser.error(
            "--rounds, --context, --output, every batch and every --prefill must be at least 1; give "
            "--batches or --prefill"
        )
    if "vllm" in arguments.engines and arguments.vllm_python is None:
        parser.error("vllm requires --vllm-python, the Python interpreter of an environment with vLLM's CPU build")
    if "llama-cpp" in arguments.engines:
        if arguments.llama_python is None or arguments.llama_gguf is None:
            parser.error(
                "llama-cpp requires --llama-python, the interpreter of an environment with llama-cpp-python, and "
                "--llama-gguf, the model as a GGUF file"
            )
        if any(batch > 1 for batch in arguments.batches):
            parser.error("llama-cpp runs one sequence at a time in this benchmark; use --batches 1")
    console = Console()
    try:
        folder = resolve_model(arguments.model).path
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = []
            for name in dict.fromkeys(arguments.engines):
                console.print(f"loading {name}")
                command = _command(name, folder, cases, arguments)
                engines.append(
                    stack.enter_context(started(name, command, logs / f"{name}.log", is_ours=name not in _FOREIGN))
                )
            results = []
            for case in cases:
                console.print(case.name)
                results.append((case, run_rounds(case, engines, arguments.rounds, arguments.seed)))
    except BatonError as error:
        parser.exit(1, f"{error}\n")
    console.print(render(results))
    if arguments.json is not None:
        report = [{"work": case.name, "tokens": case.num_tokens, "seconds": times} for case, times in results]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
