"""Token ids of one growing sequence to text, piece by piece. No torch here."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = 6
"""Tokens of the prompt that decide how the first token of the output is written."""
_REPLACEMENT_CHAR = "\ufffd"
# A token of a byte-fallback vocabulary holds at least one byte, and no character has more than four.
_MAX_PENDING_TOKENS = 16


class Strategy(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Decodes one growing sequence piece by piece.

    A piece never ends within a character that later tokens complete, and all pieces together are the text of the whole
    sequence. The cost per token does not grow with the length of the sequence.
    """

    def __init__(self, strategy: Strategy, hidden_token_ids: frozenset[int]) -> None:
        self._strategy = strategy
        self._hidden = hidden_token_ids

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that ``token_ids`` add, as far as it is final."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """Like :meth:`push`, for one token."""
        return "" if token_id in self._hidden else self._strategy.push(token_id)

    def flush(self) -> str:
        """Returns the withheld text, with U+FFFD for an incomplete character. Call it once, at the end."""
        return self._strategy.flush()


class ByteLevelStrategy:
    """Exact and constant-time: every token is bytes, and text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStrategy:
    """For decoders whose text of a token depends on its neighbours: decodes a window twice and returns the difference.

    ``ids[prefix:read]`` is context whose text was returned; ``ids[read:]`` is pending. A window that ends in U+FFFD may
    be an incomplete byte-fallback character and is withheld. A run of invalid bytes would be withheld without end, so
    beyond ``_MAX_PENDING_TOKENS`` all but the newest tokens are released: their text can no longer change.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(context)
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT_CHAR):
            if len(self._ids) - self._read <= _MAX_PENDING_TOKENS:
                return ""
            return self._release(len(self._ids) - 3)
        return self._release(len(self._ids))

    def flush(self) -> str:
        return self._release(len(self._ids))

    def _release(self, end: int) -> str:
        known = self._decode(self._ids[: self._read])
        text = self._decode(self._ids[:end])
        # An invalid byte turns the whole run of byte tokens around it into U+FFFD, including text that was returned.
        delta = text[len(known) :] if text.startswith(known) else self._decode(self._ids[self._read : end])
        if not delta:
            # There is no text yet. The context stays, since otherwise a later token would lose its leading space.
            if end - self._read > _MAX_PENDING_TOKENS:
                del self._ids[self._read : end]
            return ""
        # At least one decoded token stays as context for the next.
        start = min(self._read, end - 1)
        self._ids = self._ids[start:]
        self._read = end - start
        return delta
