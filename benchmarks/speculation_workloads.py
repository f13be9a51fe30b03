"""The prompts of the speculation benchmark: a few of each kind, or those of a user's own files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer

WORKLOADS = ("chat", "code", "summarise", "story")
"""Answers of ``summarise`` repeat much of the prompt, which they summarise, quote or edit; ``story`` the least."""
KINDS = (*WORKLOADS, "explanation", "extraction", "json", "letter", "list", "mathematics", "rewriting", "table",
         "translation")  # fmt: skip
"""All built-in workloads. Those beyond :data:`WORKLOADS` have few prompts, and are measured when they are named."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of prompts.

    Attributes:
        prompts: token ids, with the model's chat template if it has one.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]

    def take(self, start: int, count: int) -> list[tuple[int, ...]]:
        """``count`` prompts, beginning with number ``start``, cyclically."""
        return [self.prompts[index % len(self.prompts)] for index in range(start, start + count)]


def parse_prompt_files(assignments: Iterable[str]) -> dict[str, Path]:
    """Parses ``NAME=FILE`` assignments, each of which adds a workload or replaces the one with this name.

    Raises:
        ConfigError: an assignment does not have this form.
    """
    files = {}
    for text in assignments:
        name, found, file = text.partition("=")
        if not (name.strip() and found and file.strip()):
            raise ConfigError(f"--prompts must be NAME=FILE, for example chat=prompts.jsonl, got {text!r}.")
        files[name.strip()] = Path(file.strip()).expanduser()
    return files


def load_workloads(names: Sequence[str], files: Mapping[str, Path], tokenizer: Tokenizer) -> list[Workload]:
    """Loads the workloads with these names, in order. Check the names with :func:`check_names` before.

    Raises:
        ConfigError: a file cannot be read, or contains other things than prompts.
    """
    return [Workload(name, tuple(_encode(tokenizer, text) for text in _texts(name, files))) for name in names]


def check_names(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raises :class:`ConfigError` for the first of ``names`` that is not ``known``.

    Args:
        kind: what the names stand for, for the message.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"There is no {kind} {name!r}; expected one of: {', '.join(known)}.{hint}")


def _texts(name: str, files: Mapping[str, Path]) -> list[str]:
    if name in files:
        try:
            content = files[name].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts: {files[name]} cannot be read: {error}") from error
        return _parse(content, str(files[name]))
    own = resources.files("benchmarks") / "speculation_prompts" / f"{name}.jsonl"
    return _parse(own.read_text(encoding="utf-8"), own.name)


def _parse(content: str, source: str) -> list[str]:
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"prompts: {source}, line {number} is not JSON: {error}") from error
        prompt = values.get("prompt") if isinstance(values, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f'prompts: {source}, line {number} must be an object with text in "prompt".')
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompts: {source} has no prompts; expected one JSON object per line.")
    return prompts


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode(text))
    return tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
