"""Tokenizers with the marks of a family as special tokens, as added tokens, or as ordinary text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken

from baton.engine.models.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level_tokenizer

SPECIAL, ADDED, TEXT = "special", "added", "text"


def marked_tokenizer(marks: Iterable[str], kind: str = SPECIAL, chat_template: str | None = None) -> Tokenizer:
    wrapped = transformers_tokenizer(marks, kind)
    if chat_template is not None:
        wrapped.chat_template = chat_template
    return Tokenizer(wrapped)


def transformers_tokenizer(marks: Iterable[str], kind: str = SPECIAL) -> Any:
    wrapped = byte_level_tokenizer()._hf
    if kind != TEXT:
        is_special = kind == SPECIAL
        tokens = [AddedToken(mark, special=is_special, normalized=False) for mark in marks]
        wrapped.add_tokens(tokens, special_tokens=is_special)
    return wrapped
