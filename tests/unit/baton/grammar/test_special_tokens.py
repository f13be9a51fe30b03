"""Names of special tokens inside of text are text; references to special tokens are tokens."""

from __future__ import annotations

import json

import pytest

from baton.core.token_grammar import TokenGrammar
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import choice_grammar, json_grammar, notation_grammar, regex_grammar
from baton.grammar.special_tokens import hide_special_tokens, refer_by_id
from tests.random_schemas import EOS, character_tokenizer

TOKENIZER = character_tokenizer()
OBJECT = {"type": "object", "additionalProperties": False}
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, 96, {EOS})


def allowed(state: TokenGrammar, output: list[int]) -> set[int]:
    words = state.allowed(output)
    assert words is not None
    return {token for token in range(96) if words[token // 32] >> token % 32 & 1}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (json_grammar({"const": "<eos>"}), '"<eos>"'),
        (
            json_grammar({**OBJECT, "properties": {"<eos>": {"const": 1}}, "required": ["<eos>"]}),
            '{"<eos>": 1}',
        ),
        (json_grammar({"type": "string", "pattern": "^a<eos>b$"}), '"a<eos>b"'),
        (choice_grammar(["say <eos> now"]), "say <eos> now"),
        (choice_grammar(["<eos>ok"]), "<eos>ok"),
        (regex_grammar("x<eos>y"), "x<eos>y"),
        (notation_grammar('start: "x<eos>" /y<eos>/ // <eos>\n'), "x<eos>y<eos>"),
    ],
)
def test_the_name_of_a_special_token_is_text_in_a_literal(grammar: str, text: str) -> None:
    tokens = [TOKENIZER.encode(character)[0] for character in text]
    state = GRAMMARS.compile(grammar)
    for index, token in enumerate(tokens):
        assert allowed(state, tokens[:index]) == {token}
    assert allowed(state, tokens) == {EOS}
    assert GRAMMARS.compile(grammar).forced([]) == tokens


def test_a_reference_to_a_special_token_is_the_token() -> None:
    grammar = notation_grammar('start: "a" <eos>\n')
    assert allowed(GRAMMARS.compile(grammar), TOKENIZER.encode("a")) == {EOS}


def test_only_references_are_replaced() -> None:
    ids = {"<|end|>": 7, "<s>": 1}
    text = 'start: <|end|> "<|end|>" /<s>/ <s> <[3]> <other> // <s>\nX: "\\"" <s> "<s>"'
    replaced = 'start: <[7]> "<|end|>" /<s>/ <[1]> <[3]> <other> // <s>\nX: "\\"" <[1]> "<s>"'
    assert refer_by_id(text, ids) == replaced


@pytest.mark.parametrize("vocabulary", [{"a": 0, "<s>": 1}, [["a", -1.0], ["<s>", 0.0]]])
def test_special_tokens_get_other_names_wherever_they_stand(vocabulary: object) -> None:
    added = [{"id": 1, "content": "<s>", "special": True}, {"id": 2, "content": "<tool>", "special": False}]
    hidden, ids = hide_special_tokens(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    assert ids == {"<s>": 1}
    assert "<s>" not in hidden
    content = json.loads(hidden)
    name = content["added_tokens"][0]["content"]
    assert content["added_tokens"][1]["content"] == "<tool>"
    found = content["model"]["vocab"]
    assert (found[name] if isinstance(found, dict) else found.index([name, 0.0])) == 1
