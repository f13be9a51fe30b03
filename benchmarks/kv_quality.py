"""What ``kv_transfer.encoding: int8`` costs in quality: ``python -m benchmarks.kv_quality [--help]``.

The same text is read in windows. The first half of a window is a prompt: its KV stays as it is, or goes through int8 as
in a hand-off. The second half is predicted behind it, token by token. Perplexity, divergence and agreement are those of
:mod:`benchmarks.perplexity`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.models.model_loader import load_model, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.process.worker_environment import become_like_a_worker
from benchmarks import quality_text
from benchmarks.perplexity import Quality, show, windows_of

_BLOCK_SIZE = 16
_WIDTH = 110
_LEAST_WINDOW = 4


def log_probs_behind(runner: ModelRunner, window: Sequence[int], encoding: KVEncoding) -> torch.Tensor:
    """Predictions of a window's second half but its first token, ``[num_predicted, vocab_size]``."""
    half = len(window) // 2
    # The second half as a draft, since a step gives logits for all of its tokens.
    request = Request("text", list(window[: half + 1]), SamplingParams())
    request.block_ids = list(range(runner.cache.num_blocks))
    runner.forward(runner.build_batch([ScheduledSequence(request, half)]))
    if encoding is not KVEncoding.NATIVE:
        runner.cache.pass_through(request.block_ids, half, encoding)
    request.num_computed_tokens = half
    batch = runner.build_batch([ScheduledSequence(request, 1, Draft(tuple(window[half + 1 :])))])
    return runner.forward(batch)[:-1].log_softmax(-1)


def measure(runner: ModelRunner, token_ids: Sequence[int], window: int) -> list[Quality]:
    """By encoding; the native one, with which the others are compared, first."""
    dtype = runner.loaded.dtype_name
    qualities = {encoding: Quality(f"{dtype}, KV {encoding}") for encoding in KVEncoding}
    for tokens in windows_of(token_ids, window):
        if len(tokens) < _LEAST_WINDOW:
            continue
        expected = torch.tensor(tokens[len(tokens) // 2 + 1 :])
        reference: torch.Tensor | None = None
        for encoding, quality in qualities.items():
            log_probs = log_probs_behind(runner, tokens, encoding)
            reference = log_probs if reference is None else reference
            quality.add(log_probs, expected, reference)
    return list(qualities.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quality_text.add_options(parser)
    parser.add_argument("--dtypes", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    become_like_a_worker()
    torch.set_num_threads(arguments.threads)
    source = resolve_model(arguments.model)
    token_ids = quality_text.read_tokens(arguments, source, _LEAST_WINDOW)
    console = Console(width=_WIDTH)
    console.print(f"{source.name}, {len(token_ids):,} tokens in windows of {arguments.window}")
    found: list[Quality] = []
    for dtype in arguments.dtypes:
        loaded = load_model(source, dtype, pick_device("cpu"))
        runner = ModelRunner(loaded, -(-arguments.window // _BLOCK_SIZE), _BLOCK_SIZE)
        qualities = measure(runner, token_ids, arguments.window)
        error = runner.encoding_error(KVEncoding.INT8)
        show(qualities, console)
        console.print(f"error of the logits in a worker's check: {error:.4f}")
        found += qualities
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(q) for q in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
