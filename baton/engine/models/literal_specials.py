"""Special tokens within the content of messages, such as ``<|im_end|>``, as the text that they are."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any


class LiteralSpecials:
    """Hides special tokens in messages while their chat is rendered, and encodes them as text afterwards.

    A template writes special tokens of its own, so the rendered text alone does not tell whose they are.

    Args:
        token_ids: how each special token is encoded as text, by its text.
    """

    def __init__(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._token_ids = list(token_ids.values())
        self._index = {text: index for index, text in enumerate(token_ids)}
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._mark = f"x{secrets.token_hex(12)}"
        """A client cannot guess it, and templates leave letters and digits as they are."""
        self._hidden = re.compile(rf"{self._mark}n(\d+)x")

    def hide(self, value: Any) -> Any:
        """A value of JSON, such as messages or tools, with a mark in the place of each special token in its texts."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _hide(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: f"{self._mark}n{self._index[found[0]]}x", text)

    def occurs_in(self, text: str) -> bool:
        """Whether a rendered text has marks."""
        return self._mark in text

    def split(self, text: str) -> list[str | Sequence[int]]:
        """A rendered text in pieces: text, in which special tokens are the template's, and token ids."""
        pieces: list[str | Sequence[int]] = []
        for place, piece in enumerate(self._hidden.split(text)):
            if place % 2:
                pieces.append(self._token_ids[int(piece)])
            elif piece:
                pieces.append(piece)
        return pieces
