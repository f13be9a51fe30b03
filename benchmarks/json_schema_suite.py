"""Which JSON schemas a grammar honours, refuses or gets wrong: ``python -m benchmarks.json_schema_suite FOLDER``.

FOLDER holds the JSON-Schema-Test-Suite, or the unpacked source of the package ``jsonschema``, which has it under
``json/``. A schema is *wrong* if its grammar allows a document that the suite calls invalid, *narrow* if it refuses one
that the suite calls valid, and *honoured* if neither. Documents have the keys of the schema in its order, since a
grammar fixes the order. The library that baton uses is compared with xgrammar, if that is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from baton.core.errors import InvalidRequestError
from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.tokenizer import Tokenizer
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar

_DRAFTS = ("draft2020-12", "draft7")
_VERDICTS = ("honoured", "narrow", "refused", "wrong")


class RefusedError(Exception):
    """The library says that it cannot honour a schema."""


@dataclass(frozen=True)
class Case:
    """A schema of the suite and its documents, each with whether it is valid."""

    keyword: str
    schema: Any
    documents: list[tuple[Any, bool]]


@dataclass
class Outcome:
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)


class Llguidance:
    """As baton uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._eos = tokenizer.eos_token_id or 0
        self._compiler = GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, {self._eos})
        self._compiler.load()

    def compile(self, schema: Any) -> Callable[[list[int], Outcome], bool]:
        """Compiles a schema; the result says whether it allows a text, given by its tokens, as a whole."""
        try:
            state = self._compiler.compile(json_grammar(schema))
        except InvalidRequestError as error:
            raise RefusedError(error.message) from error

        def accepts(tokens: list[int], outcome: Outcome) -> bool:
            if state.num_allowed([], tokens) < len(tokens):
                return False
            for index in range(len(tokens) + 1):
                begun_s = time.perf_counter()
                words = state.allowed([], tokens[:index])
                outcome.mask_s.append(time.perf_counter() - begun_s)
            return words is not None and bool(words[self._eos // 32] >> self._eos % 32 & 1)

        return accepts


class Xgrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import AutoTokenizer

        xgrammar = importlib.import_module("xgrammar")  # baton does not depend on it
        own = AutoTokenizer.from_pretrained(ensure_default_model())
        self._eos = tokenizer.eos_token_id or 0
        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(own, vocab_size=tokenizer.vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def compile(self, schema: Any) -> Callable[[list[int], Outcome], bool]:
        """As :meth:`Llguidance.compile`."""
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise RefusedError(str(error)) from error

        def accepts(tokens: list[int], outcome: Outcome) -> bool:
            matcher = self._xgrammar.GrammarMatcher(compiled)
            for token in tokens:
                if not matcher.accept_token(token):
                    return False
                begun_s = time.perf_counter()
                matcher.fill_next_token_bitmask(self._mask)
                outcome.mask_s.append(time.perf_counter() - begun_s)
            words = self._mask.numpy()[0]
            return bool(words[self._eos // 32] >> self._eos % 32 & 1)

        return accepts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the suite, or the source of the package jsonschema")
    folder: Path = parser.parse_args().folder
    console, tokenizer = Console(width=120), Tokenizer.load(ensure_default_model())
    libraries: dict[str, Any] = {"llguidance": Llguidance(tokenizer)}
    if importlib.util.find_spec("xgrammar"):
        libraries["xgrammar"] = Xgrammar(tokenizer)
    table = Table("draft", "library", *_VERDICTS, "compile p50", "p99", "mask p50", "p99", box=None)
    for draft in _DRAFTS:
        for name, library in libraries.items():
            outcome = judge(library, list(read_cases(folder, draft)), tokenizer)
            times = [
                f"{value * 1e6:.0f} µs" for found in (outcome.compile_s, outcome.mask_s) for value in _shares(found)
            ]
            table.add_row(draft, name, *(str(outcome.verdicts[verdict]) for verdict in _VERDICTS), *times)
            for line in outcome.wrong[:20]:
                console.print(f"{draft} {name} wrong: {line}", markup=False)
    console.print(table)


def judge(library: Any, cases: list[Case], tokenizer: Tokenizer) -> Outcome:
    """Counts what a library makes of all schemas."""
    outcome = Outcome()
    for case in cases:
        begun_s = time.perf_counter()
        try:
            accepts = library.compile(case.schema)
        except RefusedError:
            outcome.verdicts["refused"] += 1
            continue
        outcome.compile_s.append(time.perf_counter() - begun_s)
        verdict = "honoured"
        for document, is_valid in case.documents:
            text = json.dumps(_ordered(document, case.schema), ensure_ascii=False)
            if accepts(tokenizer.encode(text, add_special_tokens=False), outcome) != is_valid:
                verdict = "narrow" if is_valid and verdict != "wrong" else "wrong"
                if not is_valid:
                    outcome.wrong.append(f"{case.keyword}: {json.dumps(case.schema)} allows {text}")
        outcome.verdicts[verdict] += 1
    return outcome


def read_cases(folder: Path, draft: str) -> Iterator[Case]:
    """The suite's schemas, without the optional ones and those in other files."""
    [root] = {path.parent for path in folder.rglob(f"{draft}/type.json") if path.parent.parent.name == "tests"}
    for path in sorted(root.glob("*.json")):
        for group in json.loads(path.read_text()):
            documents = [(test["data"], test["valid"]) for test in group["tests"]]
            if "localhost:1234" not in json.dumps(group["schema"]):
                yield Case(path.stem, group["schema"], documents)


def _ordered(document: Any, schema: Any) -> Any:
    """The document with the keys that the schema names first, in the schema's order."""
    if isinstance(document, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_ordered(item, items) for item in document]
    if not isinstance(document, dict):
        return document
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    named = [key for key in properties or () if key in document]
    keys = [*named, *(key for key in document if key not in named)]
    return {key: _ordered(document[key], (properties or {}).get(key)) for key in keys}


def _shares(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


if __name__ == "__main__":
    main()
