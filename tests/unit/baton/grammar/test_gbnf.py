"""Grammars in GBNF mean what they do in llama.cpp, and messages about them have the client's names."""

from __future__ import annotations

import re

import pytest

from baton.core.errors import InvalidRequestError
from baton.grammar.bounds import MAX_RULE_DEPTH
from baton.grammar.forms import notation_grammar
from baton.grammar.gbnf import MAX_GBNF_NESTING
from tests.unit.baton.grammar.test_forms import GRAMMARS, accepts


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= ("a"{1,3}){2,3}', "aaaa", "a"),
        ('root ::= (("a"?)*)+ "b"', "aab", "ba"),
        ('root ::= x "," x\nx ::= ("a" | "b"{2})+', "a,abb", "b,a"),
        ('root ::= "\\u0041\\x42\\U0001F600\\[\\]"', "AB😀[]", "41"),
        ("root ::= [\\u0041-\\u0043]+", "ABC", "D"),
        ('root ::= "a\nb"', "a\nb", "anb"),
        ('root ::= a-b a_b\na-b ::= "x" # first\na_b ::= "y"', "xy", "xx"),
        ('root ::= start R0\nstart ::= "x"\nR0 ::= r0\nr0 ::= "y" | "(" R0 ")"', "x(y)", "xx"),
    ],
)
def test_texts_of_a_grammar(grammar: str, right: str, wrong: str) -> None:
    assert accepts(notation_grammar(grammar), right)
    assert not accepts(notation_grammar(grammar), wrong)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= Digit-List\nDigit-List ::= "a"{3,1}', "in the rule Digit-List: range end must be >= start"),
        (
            "root ::= Digit-List\nDigit-List ::= [9-0]",
            'the regular expression "[9-0]" is wrong: invalid character class',
        ),
        ("root ::= a\na ::= b", "the rule a refers to b, which is not defined"),
        ('root ::= "a" "\\q"', "Invalid escape sequence \\q at line 1"),
        ('root ::= "\\ud800"', "in the rule root: error parsing string"),
        ('root ::= a "::="\na ::= "1" # b ::= c\nb ::= "2"\n  a ::= "3"', "defines the rule a twice"),
        (f"root ::= {'(' * 3000}a{')' * 3000}", f"more than {MAX_GBNF_NESTING} parentheses in each other"),
        (f"root ::= {'(' * 40}[a]{'){1,2}' * 40}", "in the rule root: more than about 28 parentheses"),
        (
            "root ::= r0\n"
            + "".join(f'r{index} ::= "a" r{index + 1} "b"\n' for index in range(600))
            + "r600 ::= root\n",
            f"more than {MAX_RULE_DEPTH} rules lead to each other from root to r{MAX_RULE_DEPTH - 1}.",
        ),
    ],
)
def test_messages_have_the_names_of_the_client(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        GRAMMARS.compile(notation_grammar(grammar))


@pytest.mark.parametrize("text", ['"(" ' * 200, "[(] " * 200, '"a"\n# ' + "(" * 200, '"\\"(" ' * 200])
def test_parentheses_in_texts_and_comments_are_not_nested(text: str) -> None:
    assert notation_grammar(f"root ::= {text}")
