"""Whether a grammar allows a text."""

from __future__ import annotations

from baton.engine.models.tokenizer import Tokenizer
from baton.grammar.compiler import GrammarCompiler


def allows_beginning(grammar: str, text: str, grammars: GrammarCompiler, tokenizer: Tokenizer) -> bool:
    """Whether a text of the grammar may begin with ``text``."""
    tokens = tokenizer.encode(text)
    return grammars.compile(grammar).num_allowed([], tokens) == len(tokens)
