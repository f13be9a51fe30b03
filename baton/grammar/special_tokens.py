"""Keeps the names of special tokens apart from text, in a vocabulary for grammars.

llguidance divides text that a grammar forces by the model's tokenizer, which takes a special token's name in it, such
as ``<|im_end|>``, for the token. So the vocabulary gets other names, which no client knows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|<[^\s<>"/\[\]][^\s<>"/]*>')
"""Strings, expressions and comments of Lark's notation, in which names are text; and references to tokens."""


def hide_special_tokens(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """Returns a ``tokenizer.json`` with other names of the special tokens, and their ids by the names they had."""
    content: dict[str, Any] = json.loads(tokenizer_json)
    ids: dict[str, int] = {}
    key = secrets.token_hex(8)
    for token in content.get("added_tokens") or ():
        if token.get("special"):
            ids[token["content"]] = token["id"]
            token["content"] = _hidden(key, token["id"])
    model = content.get("model") or {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {
            _hidden(key, ids[name]) if ids.get(name) == number else name: number for name, number in vocabulary.items()
        }
    elif isinstance(vocabulary, list):  # of a Unigram model: [name, score] by id
        for number, entry in enumerate(vocabulary):
            if ids.get(entry[0]) == number:
                entry[0] = _hidden(key, number)
    return json.dumps(content, ensure_ascii=False), ids


def refer_by_id(grammar: str, ids: Mapping[str, int]) -> str:
    """Replaces references to special tokens by name in a grammar in Lark's notation, such as ``<|im_end|>``."""

    def by_id(found: re.Match[str]) -> str:
        number = ids.get(found[0])
        return found[0] if number is None else f"<[{number}]>"

    return _LARK_PIECE.sub(by_id, grammar)


def _hidden(key: str, number: int) -> str:
    return f"\ue000{key}:{number}\ue001"
