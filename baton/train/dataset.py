"""The target's own answers on disk, in shards that are written atomically, so that collecting can be resumed.

folder/dataset.json             settings, and how far the sources have been read
folder/shard-00000.safetensors  token_ids int32 [total], lengths int32 [samples], prompt_lengths int32 [samples]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from baton.core.errors import ConfigError
from baton.core.files import replacing
from baton.engine.draft.checkpoint import write_tensors
from baton.train.option_names import what_differs

_META_NAME = "dataset.json"


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: the first ``num_prompt_tokens`` of ``token_ids`` are the prompt, the others the answer."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class AnswerDataset:
    """Samples of one target with one set of settings.

    Args:
        folder: created if it does not exist.
        settings: everything that the samples depend on. A folder with other settings is refused.

    Attributes:
        progress: how far each source has been read; written with the next shard.

    Raises:
        ConfigError: the folder has other settings, or cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.progress: dict[str, int] = {}
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._shards: list[dict[str, int]] = []
        path = folder / _META_NAME
        if path.exists():
            self._read(path)

    def __len__(self) -> int:
        return sum(shard["samples"] for shard in self._shards)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the samples depend on, as JSON values."""
        return self._settings

    @property
    def num_answer_tokens(self) -> int:
        return sum(shard["answer_tokens"] for shard in self._shards)

    def append(self, samples: Sequence[Sample]) -> None:
        """Writes a shard, then the list of shards: an interruption in between loses only this shard."""
        if not samples:
            return
        tensors = {
            "token_ids": torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.int32),
            "lengths": torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int32),
            "prompt_lengths": torch.tensor([sample.num_prompt_tokens for sample in samples], dtype=torch.int32),
        }
        with replacing(self._shard_path(len(self._shards))) as temporary:
            write_tensors(tensors, temporary)
        answer_tokens = sum(sample.num_answer_tokens for sample in samples)
        self._shards.append({"samples": len(samples), "answer_tokens": answer_tokens})
        meta = {"settings": self._settings, "progress": self.progress, "shards": self._shards}
        with replacing(self.folder / _META_NAME) as temporary:
            temporary.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self._shards)):
            tensors = load_file(self._shard_path(index))
            start = 0
            token_ids = tensors["token_ids"].tolist()
            for length, prompt in zip(tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist(), strict=True):
                yield Sample(tuple(token_ids[start : start + length]), prompt)
                start += length

    def _read(self, path: Path) -> None:
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            settings, self.progress, self._shards = meta["settings"], meta["progress"], meta["shards"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"training data: {path} cannot be read: {error}") from error
        if settings != self._settings:
            raise ConfigError(
                f"training data: {self.folder} was collected with other options: "
                f"{what_differs(settings, self._settings)}. Give the same options, name another folder with --work, "
                "or delete this one to start over."
            )

    def _shard_path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"
