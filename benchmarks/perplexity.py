"""What a precision costs in quality: ``python -m benchmarks.perplexity [--help]``.

The same text is read by each precision, in windows that begin without context, and every token but a window's first is
predicted. Perplexity is the exponential of the mean negative log probability; beside it, how far each precision's
predictions are from those of the first one: mean Kullback-Leibler divergence, and how often both have the same token on
top.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.models.model_loader import load_model, pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.forward_pass import WEIGHTS
from baton.engine.runner.model_runner import KV_CACHES, ModelRunner
from baton.process.worker_environment import become_like_a_worker
from benchmarks import quality_text

_BLOCK_SIZE = 16
_KV = "kv_"
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are held: in a dtype, or otherwise beside activations of it; and how keys and values are."""

    dtype: str
    weights: str = "native"
    kv_cache: str = "native"

    @property
    def made_from(self) -> tuple[str, torch.device, str]:
        """What its model is loaded with: only fp8 weights are made then."""
        return self.dtype, pick_device("cpu"), self.weights if self.weights == "fp8" else "native"

    @property
    def name(self) -> str:
        """As on the command line."""
        parts = (self.weights, "" if self.kv_cache == "native" else _KV + self.kv_cache)
        return "+".join((self.dtype, *(part for part in parts if part not in ("", "native"))))

    @classmethod
    def parse(cls, text: str) -> Precision:
        """``bfloat16``, ``float32+int8``, ``bfloat16+kv_int8``; raises :class:`ValueError` for others."""
        dtype, *parts = text.split("+")
        found = {"kv_cache" if part.startswith(_KV) else "weights": part.removeprefix(_KV) for part in parts}
        precision = cls(dtype, **found)
        known = precision.weights in WEIGHTS and precision.kv_cache in KV_CACHES
        if dtype not in ("bfloat16", "float32") or not known or precision.name != text:
            raise ValueError(f"{text!r} is no precision")
        return precision


@dataclass(slots=True)
class Quality:
    """Sums over the predicted tokens, in nats.

    Attributes:
        loss: negative log probability of the text.
        divergence: of the predictions from the first precision's.
        num_same: tokens for which both have the same one on top.
    """

    precision: str
    num_tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    num_same: int = 0

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.loss / self.num_tokens)

    def add(self, log_probs: torch.Tensor, expected: torch.Tensor, reference: torch.Tensor) -> None:
        """Takes up a window.

        Args:
            log_probs: ``[num_tokens, vocab_size]``; ``reference``: those of the first precision.
            expected: int64 ``[num_tokens]``, the text.
        """
        self.num_tokens += len(expected)
        self.loss -= float(log_probs.gather(1, expected[:, None]).double().sum())
        self.divergence += float((reference.exp() * (reference - log_probs)).sum(-1).double().sum())
        self.num_same += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())


def windows_of(token_ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """Pieces of ``size`` tokens; what is left over is a piece, too, if anything can be predicted in it."""
    for first in range(0, len(token_ids), size):
        window = list(token_ids[first : first + size])
        if len(window) > 1:
            yield window


def log_probs_of(runner: ModelRunner, window: Sequence[int]) -> torch.Tensor:
    """Predictions of every token of a window but its first, ``[len(window) - 1, vocab_size]``."""
    # All tokens but the first as a draft, since a step gives logits for all of its tokens.
    request = Request("text", [window[0]], SamplingParams())
    request.block_ids = list(range(runner.cache.num_blocks))
    batch = runner.build_batch([ScheduledSequence(request, 1, Draft(tuple(window[1:])))])
    return runner.forward(batch)[:-1].log_softmax(-1)


def measure(runners: dict[str, ModelRunner], token_ids: Sequence[int], window: int) -> list[Quality]:
    """Reads the text with each; the first is what the others are compared with."""
    qualities = {name: Quality(name) for name in runners}
    for tokens in windows_of(token_ids, window):
        expected = torch.tensor(tokens[1:])
        reference: torch.Tensor | None = None
        for name, runner in runners.items():
            log_probs = log_probs_of(runner, tokens)
            reference = log_probs if reference is None else reference
            qualities[name].add(log_probs, expected, reference)
    return list(qualities.values())


def show(qualities: Sequence[Quality], console: Console) -> None:
    """A row for each precision."""
    first = qualities[0]
    table = Table("precision", "perplexity", f"× {first.precision}", "KL divergence, nats", "same token on top")
    for quality in qualities:
        table.add_row(
            quality.precision,
            f"{quality.perplexity:.3f}",
            f"{quality.perplexity / first.perplexity:.4f}",
            f"{quality.divergence / quality.num_tokens:.5f}",
            f"{quality.num_same / quality.num_tokens:.1%}",
        )
    console.print(table)


def _precision(text: str) -> Precision:
    try:
        return Precision.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; give a dtype, with weights or a KV cache: bfloat16+int8+kv_int8"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quality_text.add_options(parser)
    defaults = [Precision("float32"), *(Precision("bfloat16", weights) for weights in WEIGHTS)]
    defaults.append(Precision("bfloat16", kv_cache="int8"))
    parser.add_argument("--precisions", type=_precision, nargs="+", default=defaults)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    become_like_a_worker()
    torch.set_num_threads(arguments.threads)
    source = resolve_model(arguments.model)
    token_ids = quality_text.read_tokens(arguments, source, 2)
    blocks = -(-arguments.window // _BLOCK_SIZE)
    loaded = {p.made_from: load_model(source, *p.made_from) for p in arguments.precisions}
    runners = {
        p.name: ModelRunner(loaded[p.made_from], blocks, _BLOCK_SIZE, weights=p.weights, kv_cache=p.kv_cache)
        for p in arguments.precisions
    }
    qualities = measure(runners, token_ids, arguments.window)
    console = Console(width=_WIDTH)
    console.print(f"{source.name}, {len(token_ids):,} tokens in windows of {arguments.window}")
    show(qualities, console)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(q) for q in qualities], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
