"""Checks whole tiny models: the engine's tokens equal those of transformers in every mode of computing steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from baton.core.request import SamplingParams
from baton.engine.engine import Engine
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.cuda_graphs import make_buckets
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from baton.engine.step.overlap import AheadRule, always, never
from benchmarks.device_run.part import Row
from tests.engine_runs import build_engine, run, run_tokens
from tests.tiny_models import model_with_reference, random_prompts

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v2", "phi3")
BLOCK_SIZE = 16
NUM_BLOCKS = 64
_LENGTHS = (11, 3, 30, 1, 19)
_CHUNK_TOKENS = 8
_NUM_TOKENS = 12


def make_runner(loaded: LoadedModel, cuda_graphs: str) -> ModelRunner:
    """A runner with the model's own modules and the device's best attention."""
    return ModelRunner(loaded, NUM_BLOCKS, BLOCK_SIZE, RunnerOptions(decoder="transformers", cuda_graphs=cuda_graphs))


def compared(
    name: str, found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], **figures: int | float
) -> dict[str, object]:
    """A row that is right when all tokens are equal; otherwise it names the first difference."""
    row: dict[str, object] = {"name": name, "ok": found == expected, "tokens": sum(map(len, expected)), **figures}
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        if own != other:
            place = next((at for at, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), -1)
            return {**row, "error": f"request {index} differs at token {place}: {own} instead of {other}"}
    return row


def sampled_params(count: int) -> list[SamplingParams]:
    """Seeded sampling parameters of several kinds."""
    plain = SamplingParams(max_tokens=_NUM_TOKENS)
    kinds = [plain, replace(plain, top_k=20), replace(plain, top_p=0.8), replace(plain, repetition_penalty=1.2)]
    return [replace(kinds[index % len(kinds)], seed=1000 + index) for index in range(count)]


def check_architecture(name: str, device: torch.device) -> Iterator[Row]:
    """Compares greedy tokens with ``transformers.generate``, then seeded tokens with those of the first mode.

    The modes are: without graphs, with graphs (on CUDA), and each of them with steps that are launched before the
    tokens of the previous step are known.
    """
    prompts = random_prompts(_LENGTHS)
    model, expected = model_with_reference(name, prompts, _NUM_TOKENS, device)
    model.set_experts_implementation("batched_mm")  # transformers' default waits for the device in float32
    loaded = prepare_model(model, "float32")
    seeded: list[list[int]] | None = None
    for way in ("eager", *(["graphs"] if device.type == "cuda" else [])):
        runner = make_runner(loaded, "auto" if way == "graphs" else "off")
        figures: dict[str, int] = {}
        if way == "graphs":
            wanted = len(make_buckets(len(prompts), 0))
            runner.capture_graphs(len(prompts), 0, loaded.max_model_len)
            figures["graphs"] = runner.num_graphs
            if runner.num_graphs < wanted:
                yield {"name": f"{name}: recording", "ok": False, "error": f"{runner.num_graphs} of {wanted} graphs"}
        check_model(runner)
        for suffix, rule in (("", never), (", overlapped", always)):
            found = run_tokens(_engine(runner, rule), prompts, _NUM_TOKENS)
            yield compared(f"{name}: {way}{suffix}", found, expected, **figures)
            drawn = [each.token_ids for each in run(_engine(runner, rule), prompts, sampled_params(len(prompts)))]
            if seeded is None:
                seeded = drawn
            else:
                yield compared(f"{name}: {way}{suffix}, seeded", drawn, seeded, **figures)
        runner.close()


def _engine(runner: ModelRunner, rule: AheadRule) -> Engine:
    return build_engine(runner, chunk_tokens=_CHUNK_TOKENS, runs_ahead=rule)
