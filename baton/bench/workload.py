"""Sources of requests: drawn from distributions, taken from a trace, or read from a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from baton.bench.endpoint import RequestSpec
from baton.bench.lengths import LengthDistribution, LengthLimits
from baton.bench.prompts import PromptWriter, Segment
from baton.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, lay_blocks
from baton.core.errors import ConfigError

_GOLDEN_SHARE = (5**0.5 - 1) / 2
"""Golden ratio, whose multiples modulo 1 are spread evenly over [0, 1) for any number of them."""


class Workload(Protocol):
    """A source of requests."""

    def requests(self, stage: int) -> Iterator[RequestSpec]:
        """Requests of a stage, with equal lengths for equal seeds, and different texts in every stage and run."""
        ...

    def describe(self) -> dict[str, Any]:
        """The workload's description for the report; JSON-ready."""
        ...


class SyntheticWorkload:
    """Requests with lengths from distributions. No two prompts share a prefix."""

    def __init__(
        self,
        writer: PromptWriter,
        input_lengths: LengthDistribution,
        output_lengths: LengthDistribution,
        limits: LengthLimits,
        seed: int = 0,
    ) -> None:
        self._writer = writer
        self._input_lengths = input_lengths
        self._output_lengths = output_lengths
        self._limits = limits
        self._seed = seed

    def requests(self, stage: int) -> Iterator[RequestSpec]:
        rng = np.random.default_rng([self._seed, stage])
        for index in itertools.count():
            drawn = self._input_lengths.sample(rng), self._output_lengths.sample(rng)
            input_tokens, output_tokens, is_clipped = self._limits.fit(*drawn)
            segment = Segment(f"request/{stage}/{index}", self._writer.text_tokens(input_tokens))
            yield RequestSpec(self._writer.write([segment]), input_tokens, output_tokens, is_clipped=is_clipped)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "input": self._input_lengths.description,
            "output": self._output_lengths.description,
            "limits": self._limits.describe(),
        }


class TraceWorkload:
    """Requests with the lengths and shared prefixes of a trace, repeated in order.

    Each stage begins at a different request. The first one, which is the only one of a replay, begins at the start.
    """

    def __init__(self, writer: PromptWriter, trace: Sequence[TraceRequest], limits: LengthLimits, source: str) -> None:
        self._writer = writer
        self._trace = trace
        self._limits = limits
        self._source = source

    def requests(self, stage: int) -> Iterator[RequestSpec]:
        size = len(self._trace)
        for position in itertools.count(_first_item(stage, size)):
            lap, index = divmod(position, size)
            request = self._trace[index]
            input_tokens, output_tokens, is_clipped = self._limits.fit(request.input_tokens, request.output_tokens)
            segments = self._segments(request, self._writer.text_tokens(input_tokens), f"{stage}/{lap}", index)
            yield RequestSpec(self._writer.write(segments), input_tokens, output_tokens, request.at_s, is_clipped)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "trace",
            "source": self._source,
            "num_requests": len(self._trace),
            "with_shared_prefixes": any(request.hash_ids for request in self._trace),
            "limits": self._limits.describe(),
        }

    def _segments(self, request: TraceRequest, text_tokens: int, lap: str, index: int) -> list[Segment]:
        if not request.hash_ids:
            return [Segment(f"request/{lap}/{index}", text_tokens)]
        return block_segments(
            request.hash_ids, MOONCAKE_BLOCK_TOKENS * self._limits.input_scale, text_tokens, f"block/{lap}"
        )


def _first_item(stage: int, size: int) -> int:
    """Index of a stage's first item among ``size`` items: 0 at first, then far from the starts of earlier stages."""
    return int(stage * _GOLDEN_SHARE * size) % size


def block_segments(hash_ids: Sequence[int], block_tokens: float, text_tokens: int, key: str) -> list[Segment]:
    """A segment for each part from :func:`baton.bench.traces.lay_blocks`, with ``text_tokens`` in total."""
    return [Segment(f"{key}/{block}", tokens) for block, tokens in lay_blocks(hash_ids, block_tokens, text_tokens)]


class FileWorkload:
    """The prompts of a file in order. Each stage begins at a different one."""

    def __init__(
        self, prompts: Sequence[str], output_lengths: LengthDistribution, limits: LengthLimits, seed: int, source: str
    ) -> None:
        self._prompts = prompts
        self._output_lengths = output_lengths
        self._limits = limits
        self._seed = seed
        self._source = source

    def requests(self, stage: int) -> Iterator[RequestSpec]:
        rng = np.random.default_rng([self._seed, stage])
        size = len(self._prompts)
        for position in itertools.count(_first_item(stage, size)):
            prompt = self._prompts[position % size]
            _, output_tokens, is_clipped = self._limits.fit(1, self._output_lengths.sample(rng))
            yield RequestSpec(prompt, None, output_tokens, is_clipped=is_clipped)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "prompts",
            "source": self._source,
            "num_prompts": len(self._prompts),
            "output": self._output_lengths.description,
            "limits": self._limits.describe(),
        }


def read_prompts(path: Path) -> list[str]:
    """Reads the prompts of a JSONL file of ``{"prompt": "..."}``.

    Raises:
        ConfigError: the file cannot be read, has no prompts, or a line has another form.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'--prompts: line {number} of {path} is not {{"prompt": "..."}}.') from error
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"--prompts: line {number} of {path} has no text in prompt.")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"--prompts: {path} contains no prompts.")
    return prompts
