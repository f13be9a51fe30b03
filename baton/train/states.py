"""Sources of the target's states over samples: computed on each use, or computed once and read from disk.

folder/states-00000.safetensors  features [total, num_layers * hidden_size], final [total answers, hidden_size],
                                 choices int32 [total answers]; of :data:`_SHARD_SAMPLES` samples, in order
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from baton.core.files import replacing
from baton.engine.draft.checkpoint import write_tensors
from baton.train.dataset import Sample
from baton.train.target import FrozenTarget, SampleStates

_SHARD_SAMPLES = 128


class States(Protocol):
    """A source of the target's states."""

    def load(self, indices: Sequence[int]) -> list[SampleStates]:
        """The states of the samples at these indices."""
        ...


class LiveStates:
    """Runs the target on each use."""

    def __init__(self, target: FrozenTarget, samples: Sequence[Sample]) -> None:
        self._target = target
        self._samples = samples

    def load(self, indices: Sequence[int]) -> list[SampleStates]:
        return self._target.states_of([self._samples[index] for index in indices])


class JoinedStates:
    """Concatenates several sources."""

    def __init__(self, parts: Sequence[States], sizes: Sequence[int]) -> None:
        self._parts = parts
        self._starts = _starts(sizes)

    def load(self, indices: Sequence[int]) -> list[SampleStates]:
        found: list[SampleStates] = []
        for index in indices:
            part = bisect.bisect_right(self._starts, index) - 1
            found += self._parts[part].load([index - self._starts[part]])
        return found


class CachedStates:
    """Reads states from disk, after :meth:`fill` has written them.

    Args:
        folder: created if necessary. Its shards are reused if they belong to these samples, this target and these
            layers; other shards are replaced.
        target_fingerprint: identifies the target.
    """

    def __init__(self, folder: Path, target: FrozenTarget, target_fingerprint: str, samples: Sequence[Sample]) -> None:
        self._folder = folder
        self._target = target
        self._key = f"{target_fingerprint}:{target.feature_layers}"
        self._samples = samples
        self._token_starts = _starts(len(sample.token_ids) for sample in samples)
        self._answer_starts = _starts(_num_answer_rows(sample) for sample in samples)
        self._files: dict[int, Any] = {}

    def num_missing_tokens(self) -> int:
        """The number of tokens over which :meth:`fill` would run the target."""
        return sum(self._num_tokens(index) for index in self._missing())

    def fill(self, report: Callable[[int], None] = lambda num_tokens: None) -> None:
        """Computes the missing shards and writes each of them atomically.

        Args:
            report: called after each shard with the number of its tokens.
        """
        for index in self._missing():
            self._write(index)
            report(self._num_tokens(index))

    def load(self, indices: Sequence[int]) -> list[SampleStates]:
        return [self._load(index) for index in indices]

    def _missing(self) -> list[int]:
        """The shards that are still to be computed."""
        num_shards = -(-len(self._samples) // _SHARD_SAMPLES)
        return [index for index in range(num_shards) if not self._is_valid(index)]

    def _num_tokens(self, index: int) -> int:
        return sum(len(sample.token_ids) for sample in self._shard_samples(index))

    def _load(self, index: int) -> SampleStates:
        shard = index // _SHARD_SAMPLES
        first = shard * _SHARD_SAMPLES
        if shard not in self._files:
            self._files[shard] = safe_open(self._path(shard), framework="pt")
        file, device = self._files[shard], self._target.model.device
        tokens = _span(self._token_starts, first, index)
        answers = _span(self._answer_starts, first, index)
        return SampleStates(
            file.get_slice("features")[tokens].to(device),
            file.get_slice("final")[answers].to(device),
            file.get_slice("choices")[answers].to(device, torch.int64),
        )

    def _write(self, index: int) -> None:
        states = self._target.states_of(self._shard_samples(index))
        tensors = {
            "features": torch.cat([state.features for state in states]).cpu(),
            "final": torch.cat([state.final for state in states]).cpu(),
            "choices": torch.cat([state.choices for state in states]).to("cpu", torch.int32),
        }
        with replacing(self._path(index)) as temporary:
            write_tensors(tensors, temporary, {"key": self._digest(index)})

    def _is_valid(self, index: int) -> bool:
        if not self._path(index).is_file():
            return False
        try:
            with safe_open(self._path(index), framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
        except (OSError, SafetensorError):
            return False
        return metadata.get("key") == self._digest(index)

    def _digest(self, index: int) -> str:
        digest = hashlib.blake2b(self._key.encode(), digest_size=16)
        for sample in self._shard_samples(index):
            digest.update(f"{sample.num_prompt_tokens}:{sample.token_ids}".encode())
        return digest.hexdigest()

    def _shard_samples(self, index: int) -> Sequence[Sample]:
        return self._samples[index * _SHARD_SAMPLES : (index + 1) * _SHARD_SAMPLES]

    def _path(self, index: int) -> Path:
        return self._folder / f"states-{index:05d}.safetensors"


def _num_answer_rows(sample: Sample) -> int:
    return len(sample.token_ids) - max(0, sample.num_prompt_tokens - 1)


def _starts(lengths: Iterable[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _span(starts: list[int], first: int, index: int) -> slice:
    """The rows of a sample in the shard that begins with sample ``first``."""
    return slice(starts[index] - starts[first], starts[index + 1] - starts[first])
