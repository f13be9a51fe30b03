"""Random JSON schemas whose documents are short, and a vocabulary of single characters to write them in."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from baton.engine.models.tokenizer import Tokenizer

EOS = 95
_LETTERS = "abcxyz"
_SPACE = "\u0120"


def character_tokenizer() -> Tokenizer:
    """96 tokens: the printable ASCII characters, then the one that ends a text."""
    return _tokenizer([chr(code) for code in range(ord("!"), ord("~") + 1)] + [_SPACE], [])


def json_tokenizer() -> Tokenizer:
    """Like :func:`character_tokenizer`, with pairs of JSON's marks instead of capital letters."""
    pairs = ['{"', '["', '":', '",', '"}', '"]', '""', "[[", "[{", "]]", "]}", "},", "],", "}]", "}}", "{}", "[]"]
    pairs += [f":{_SPACE}", f",{_SPACE}", '"a', '"x', "tr", "al", "nu", "-1"]
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1) if not chr(code).isupper()]
    return _tokenizer([*characters, _SPACE, *pairs, "Z"], pairs)


def _tokenizer(tokens: list[str], pairs: list[str]) -> Tokenizer:
    merges = [(pair[0], pair[1]) for pair in pairs]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of documents with up to about 80 characters."""
    simple = (_string, _integer, _number, _constants, _pattern, _literal)
    nested = (_object, _object, _array, _either)
    return chance.choice(simple if depth > 1 else nested if not depth else simple + nested)(chance, depth)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(5)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(-30, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randrange(500)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [chance.randrange(100) / 10, chance.randrange(1000, 2000)]}


def _constants(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [_word(chance) for _ in range(chance.randrange(1, 4))] + chance.choice([[], [None], [7]])}


def _pattern(chance: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "string",
        "pattern": chance.choice(["^[a-c]{2}$", "^(ab|cd)+x$", "^[0-9]{3}-[0-9]$"]),
        "maxLength": 7,
    }


def _literal(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null"])}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_LETTERS, chance.randrange(1, 4 - depth))
    required = [name for name in names if chance.random() < 0.7]
    properties = {name * chance.randrange(1, 4): random_schema(chance, depth + 1) for name in names}
    needed = [name for name in properties if name[0] in required]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(2)
    items = random_schema(chance, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}


def _word(chance: random.Random) -> str:
    return "".join(chance.choices(_LETTERS, k=chance.randrange(1, 5)))
