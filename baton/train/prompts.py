"""The sources of training prompts: files of prompts, and the target itself.

A prompt has one or several turns of the user; the target answers each of them.

A chat model can also write user turns: given its template up to the user's turn, it generates one (Xu et al.,
"Magpie", arXiv 2406.08464).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer

_MARK = "BATON-MARKS-THE-USER-TURN"
_MIN_TURN_CHARS = 12
_MAX_TURN_CHARS = 1200
_MIN_LETTERS = 0.6

Turns = tuple[str, ...]
"""The turns of a conversation: the user's alone, or the user's and the target's alternately."""


def read_prompts(paths: Iterable[Path]) -> list[Turns]:
    """Reads prompts from JSON-lines files, one object with a ``prompt`` per line, in the order of the files.

    A prompt is a text, or a list of the texts of several turns.

    Raises:
        ConfigError: a file cannot be read, or a line is malformed; the message names the line.
    """
    prompts = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts: {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_prompt_of(line, f"{path}, line {number}"))
    return prompts


def _prompt_of(line: str, where: str) -> Turns:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'prompts: {where} is not of the form {{"prompt": "…"}}.') from error
    turns = prompt if isinstance(prompt, list) else [prompt]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"prompts: {where} has no text in prompt.")
    return tuple(turns)


class PromptFormat(Protocol):
    """Converts prompts into the target's input.

    Attributes:
        before_user: token ids up to the beginning of a user's turn; ``None`` if the target cannot write turns.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def before_user(self) -> tuple[int, ...] | None: ...

    def prompt(self, *turns: str) -> tuple[int, ...]:
        """The token ids up to the beginning of the answer. The first and the last turn are the user's."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Unchanged prompts, for models that only continue texts. Implements :class:`PromptFormat`."""

    tokenizer: Tokenizer
    before_user: None = None

    def prompt(self, *turns: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("\n\n".join(turns)))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template around the turns of one exchange, as token ids. Implements :class:`PromptFormat`."""

    tokenizer: Tokenizer
    before_user: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        """The format of a tokenizer. Raises :class:`ConfigError` when its template does not contain the user's text."""
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
        before, found, _ = text.partition(_MARK)
        if not found:
            raise ConfigError("the model's chat template does not render the user's text, so no turn can be sampled.")
        return cls(tokenizer, tuple(tokenizer.encode(before, add_special_tokens=False)))

    def prompt(self, *turns: str) -> tuple[int, ...]:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
        text = self.tokenizer.render_chat(messages)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def is_usable_turn(text: str) -> bool:
    """Whether a sampled user turn looks plausible."""
    text = text.strip()
    if not _MIN_TURN_CHARS <= len(text) <= _MAX_TURN_CHARS or "\ufffd" in text:
        return False
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return letters >= _MIN_LETTERS * len(text)
