"""Where training prompts come from: files of prompts, and the target itself.

A chat model has learned what users say as well: given its template up to the user's turn, it writes one
(Xu et al., "Magpie", arXiv 2406.08464).
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


def read_prompts(paths: Iterable[Path]) -> list[str]:
    """Prompts of JSON-lines files, one object with a ``prompt`` per line, in the order of the files.

    Raises:
        ConfigError: a file cannot be read, or a line is something else; the message names the line.
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


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'prompts: {where} is not of the form {{"prompt": "…"}}.') from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"prompts: {where} has no text in prompt.")
    return prompt


class PromptFormat(Protocol):
    """How a prompt becomes what the target reads.

    Attributes:
        before_user: token ids up to where a user's turn begins; None where the target cannot write one.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def before_user(self) -> tuple[int, ...] | None: ...

    def prompt(self, user_turn: str) -> tuple[int, ...]:
        """Everything up to where the answer begins."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Prompts as they are, for models that only continue texts. Implements :class:`PromptFormat`."""

    tokenizer: Tokenizer
    before_user: None = None

    def prompt(self, user_turn: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(user_turn))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template around the turns of one exchange, as token ids. Implements :class:`PromptFormat`."""

    tokenizer: Tokenizer
    before_user: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        """Raises :class:`ConfigError` when the template changes or moves what the user says."""
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
        before, found, _ = text.partition(_MARK)
        if not found:
            raise ConfigError("the model's chat template does not show what the user says, so no turn can be sampled.")
        return cls(tokenizer, tuple(tokenizer.encode(before, add_special_tokens=False)))

    def prompt(self, user_turn: str) -> tuple[int, ...]:
        text = self.tokenizer.render_chat([{"role": "user", "content": user_turn}])
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def is_usable_turn(text: str) -> bool:
    """Whether a sampled user turn looks like something that somebody would say."""
    text = text.strip()
    if not _MIN_TURN_CHARS <= len(text) <= _MAX_TURN_CHARS or "\ufffd" in text:
        return False
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return letters >= _MIN_LETTERS * len(text)
