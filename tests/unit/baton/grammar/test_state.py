from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.core.token_grammar import TokenGrammar
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar, notation_grammar, regex_grammar
from tests.random_schemas import EOS, character_tokenizer, random_schema

TOKENIZER = character_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, 96, {EOS})
REAL_EOS, NAMED = 2, 20_000
_REAL_TOKENIZER = files("baton.engine.draft") / "assets/smollm2-135m-instruct-draft_model/tokenizer.json"
REAL_TOKENIZER = Backend.from_str(_REAL_TOKENIZER.read_text())
REAL_GRAMMARS = GrammarCompiler(_REAL_TOKENIZER.read_text, 49152, {REAL_EOS})
MARKS = [
    index
    for token, index in json.loads(_REAL_TOKENIZER.read_text())["model"]["vocab"].items()
    if set(token) <= set('{}[]":,\u0120dog1')
] + [0, 1, NAMED]
"""Tokens of the real vocabulary that say where parts of a text begin and end."""
GRAMMAR = json_grammar({"type": "object", "properties": {"ab": {"enum": ["x1", "x2"]}}, "required": ["ab"]})


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def allowed(state: TokenGrammar, output: list[int], drafted: list[int] | None = None) -> set[int] | None:
    words = state.allowed(output, drafted or [])
    return None if words is None else set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def test_forced_tokens_are_the_only_text() -> None:
    state, output = GRAMMARS.compile(GRAMMAR), TOKENIZER.encode('{"ab": "x')
    assert text_of(state.forced([])) == '{"ab": "x'
    assert state.forced(output) == []
    assert allowed(state, output) == set(TOKENIZER.encode("12"))


class Counting:
    """A matcher that counts what takes a time in proportion to the length of a forced text."""

    def __init__(self, matcher: LLMatcher, counts: Counter[str] | None = None) -> None:
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._matcher = matcher

    def deep_copy(self) -> Counting:
        return Counting(self._matcher.deep_copy(), self.counts)

    def compute_ff_tokens(self) -> list[int]:
        self.counts["looks"] += 1
        return self._matcher.compute_ff_tokens()

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.counts["masks"] += 1
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("are_drafted", [False, True])
def test_a_long_forced_text_is_looked_for_once(are_drafted: bool) -> None:
    state, text = GRAMMARS.compile(regex_grammar("ab(c{200}|x)d")), TOKENIZER.encode("ab" + "c" * 200 + "d")
    matcher = state._matcher = Counting(state._matcher)
    for end in range(3, len(text)):
        if are_drafted:
            assert state.forced(text[:end]) == text[end:]
            assert allowed(state, text[:end], text[end : end + 3]) == set(text[end + 3 : end + 4] or [EOS])
        else:
            assert allowed(state, text[:end]) == {text[end]}
    assert matcher.counts == {"looks": 1, "masks": 3 if are_drafted else 1}
    other = GRAMMARS.compile(regex_grammar("a(b|bc)"))
    assert other.forced([]) == TOKENIZER.encode("ab")
    assert other.forced(TOKENIZER.encode("ab")) == []


def test_a_grammar_that_has_ended_allows_only_the_end() -> None:
    grammar, output = regex_grammar("abc"), TOKENIZER.encode("abc")
    assert allowed(GRAMMARS.compile(grammar), output) == {EOS}
    assert allowed(GRAMMARS.compile(grammar, output), output) == {EOS}


def test_a_refused_draft_has_no_mask_and_changes_nothing() -> None:
    state, start = GRAMMARS.compile(GRAMMAR), TOKENIZER.encode("{")
    assert allowed(state, start, TOKENIZER.encode('"ac')) is None
    assert state.num_allowed(start, TOKENIZER.encode('"ac')) == 2
    assert state.num_allowed(start, [EOS]) == 0
    assert allowed(state, start) == set(TOKENIZER.encode('"'))


def test_output_that_the_grammar_refuses() -> None:
    with pytest.raises(InvalidRequestError, match="does not allow the tokens before this call"):
        GRAMMARS.compile(GRAMMAR, TOKENIZER.encode("["))
    state = GRAMMARS.compile(GRAMMAR)
    assert allowed(state, TOKENIZER.encode("[")) == set()
    assert "left the grammar" in str(state.error)
    assert state.forced(TOKENIZER.encode("[")) == []


def _long_texts(chance: random.Random) -> str:
    names = [f"{chance.choice(['user_id', 'GivenName', ' 12345'])}{index}" for index in range(2)]
    parts = {name: {"const": f"it's {name}, isn't it?"} for name in names} | {"end": random_schema(chance)}
    return json_grammar({"type": "object", "properties": parts, "required": list(parts)})


def _free_json(chance: random.Random) -> str:
    """What begins alike in many ways, with tokens that are several parts of a text at once."""
    text = {"type": "string"}
    alternatives = [{"type": "object", "additionalProperties": text}, {"type": "array", "items": text}, text]
    return json_grammar(
        chance.choice(
            [True, {"type": "object"}, {"type": "array", "items": {"anyOf": alternatives[: 2 + chance.randrange(2)]}}]
        )
    )


def _special_tokens(chance: random.Random) -> str:
    """Calls between special tokens, which have other lengths in the grammar than as text."""
    return notation_grammar(
        'start: (text | call)*\ntext: /[a-z"{]+/\n'
        f'call: <[1]> name <[{NAMED}]> | <[1]> %json {{"type": "object"}} <[0]>\nname: "dog" | "good" | /["0-9]+/'
    )


def _rules(chance: random.Random) -> str:
    """Rules that end at a text, with text between them that is ignored."""
    options = chance.choice(["{}", '{"allow_initial_skip": true}'])
    bound = chance.choice(["capture", 'stop="og"', 'suffix="}"', "lazy"])
    return notation_grammar(
        f"%llguidance {options}\n%ignore / +/\nstart: (a | b | <[{NAMED}]>)+\n"
        f'a[{bound}]: /[a-z "0-9]+/\nb: "{{" /(.|\\n)*/ ("}}" | "d" /[a-f1]{{2}}/)\n'
    )


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize(
    ("grammars", "eos", "make"),
    [
        (GRAMMARS, EOS, _long_texts),
        (GRAMMARS, EOS, _free_json),
        (REAL_GRAMMARS, REAL_EOS, _long_texts),
        (REAL_GRAMMARS, REAL_EOS, _free_json),
        (REAL_GRAMMARS, REAL_EOS, _special_tokens),
        (REAL_GRAMMARS, REAL_EOS, _rules),
    ],
)
def test_a_state_depends_only_on_its_tokens(
    grammars: GrammarCompiler, eos: int, make: Callable[[random.Random], str], seed: int
) -> None:
    """Any walk over drafts, in any order, leaves the masks of a fresh state."""
    chance = random.Random(seed)
    grammar = make(chance)
    state, output = grammars.compile(grammar), list[int]()
    paths: list[list[int]] = [[]]
    for _ in range(60):
        path = list(chance.choice(paths))
        path = path[: chance.randrange(len(path) + 1)]
        if chance.random() < 0.3:
            state.forced(output)
        words = state.allowed(output, path)
        assert words is not None
        np.testing.assert_array_equal(words, grammars.compile(grammar, output).allowed(output, path))
        tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(tokens)
        if list(tokens) == [eos] and not path:
            break
        marks = np.intersect1d(tokens, MARKS) if grammars is REAL_GRAMMARS and chance.random() < 0.8 else tokens
        token = int(chance.choice(marks if len(marks) else tokens))
        if token != eos:
            paths.append([*path, token])
            assert state.num_allowed(output, chance.choice([path, paths[-1], [*path, token, eos]])) >= len(path)
            if chance.random() < 0.2:  # it becomes output
                output, paths = [*output, *path, token], [[]]
    assert state.error is None


_UNION = json_grammar(
    {"anyOf": [{"type": "object"}, {"type": "array", "items": {"anyOf": [{"type": "array"}, {"type": "string"}]}}]}
)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        *((json_grammar(True), text) for text in ("", "[", '{"a": [', '[["dog", ')),
        *((_UNION, text) for text in ("", "[", '{"a": [', '[["dog", ')),
        *((_special_tokens(random.Random(0)), text) for text in ("", "a<|im_start|>", 'a<|im_start|>{"b": "')),
    ],
)
def test_masks_of_siblings_do_not_mix(grammar: str, text: str) -> None:
    chance, output = random.Random(4), REAL_TOKENIZER.encode(text).ids
    state = REAL_GRAMMARS.compile(grammar, output)

    def marks_behind(path: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], list[int]]:
        words = REAL_GRAMMARS.compile(grammar, [*output, *path]).allowed([*output, *path])
        assert words is not None
        tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return words, np.intersect1d(tokens, MARKS).tolist()

    expected: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
    paths: list[tuple[int, ...]] = [()]
    for path in paths:  # it grows
        expected[path], marks = marks_behind(path)
        if len(path) < 3:
            paths += [(*path, mark) for mark in chance.sample(marks, min(len(marks), 8 - 2 * len(path)))]
    for path in chance.choices(paths, k=1500):
        state._masks.clear()  # which would be kept for a path
        np.testing.assert_array_equal(state.allowed(output, path), expected[path])


def test_a_model_without_a_fast_tokenizer_has_no_grammars() -> None:
    without = GrammarCompiler(str, 96, {EOS})
    without.load()
    with pytest.raises(UnsupportedParameterError, match=r"allows no grammars .*no tokenizer\.json"):
        without.compile(GRAMMAR)


def test_every_column_of_the_logits_has_a_bit() -> None:
    wide = GrammarCompiler(TOKENIZER.to_json, 130, {EOS}).compile(GRAMMAR)
    words = wide.allowed([])
    assert words is not None
    assert len(words) == 5
    assert not words[3:].any()
