"""Compiles grammars for a model's vocabulary."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.grammar.bounds import check_bounds
from baton.grammar.fault_place import smallest_fault
from baton.grammar.gbnf import client_rule
from baton.grammar.refusals import reason_of, refusal
from baton.grammar.schemas import rewrite_schemas, schemas_of
from baton.grammar.special_tokens import hide_special_tokens, refer_by_id
from baton.grammar.state import GrammarState

MAX_GRAMMAR_CHARS = 256 * 1024
_CACHED_GRAMMARS = 32
_NUM_ERROR_CHARS = 300
_STACK_BYTES = 512 * 2**20
"""Of the thread that compiles a grammar. llguidance recurses along chains of references, and a process whose stack
overflows ends. Chains of :data:`MAX_GRAMMAR_CHARS` need a tenth of it; only what is used takes memory."""
_STACK_SIZE_LOCK = threading.Lock()


class GrammarCompiler:
    """Compiles grammars, and keeps the last ones compiled. Any thread may use it.

    Args:
        tokenizer_json: returns the content of a ``tokenizer.json``; empty for a tokenizer without one. It is called
            once, when it is needed.
        vocab_size: columns of the model's logits.
        eos_token_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, tuple[LLMatcher, bool]] = OrderedDict()
        self._special_ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Reads the vocabulary, so that the first grammar need not wait for it. Does nothing where this fails: the
        first grammar says why."""
        with self._lock:
            try:
                _ = self._vocabulary
            except UnsupportedParameterError:
                return

    def compile(self, grammar: str, output: Sequence[int] = ()) -> GrammarState:
        """The grammar's state behind some output tokens.

        Args:
            grammar: of :mod:`baton.grammar.forms`, or in Lark's notation.

        Raises:
            InvalidRequestError: the grammar is wrong, unsupported, too large or too complex, or does not allow these
                tokens; the error says which part.
            UnsupportedParameterError: this model's tokenizer allows no grammars.
        """
        matcher, has_ids = self._matcher(grammar)
        return GrammarState(matcher.deep_copy(), self._vocab_size, output, has_ids=has_ids)

    def _matcher(self, grammar: str) -> tuple[LLMatcher, bool]:
        """A matcher at the grammar's beginning, and whether the grammar names tokens by id."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"The grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed. Make the schema "
                "smaller."
            )
        with self._lock:
            vocabulary, found = self._vocabulary, self._compiled.get(grammar)
        if found is None:
            try:
                prepared = _prepared(grammar, self._special_ids)
                found = _in_deep_thread(lambda: _compile(vocabulary, prepared)), "<[" in prepared
            except RecursionError as error:
                raise _refusal("recursion limit exceeded") from error
            except InvalidRequestError as error:
                raise self._with_place(error, grammar) from error
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return found

    def _with_place(self, refused: InvalidRequestError, grammar: str) -> InvalidRequestError:
        """The refusal with the place in the schema that it is about, if that is found."""

        def reason_for(schema: Mapping[str, Any]) -> str:
            try:
                prepared = _prepared(json.dumps({"grammars": [{"json_schema": schema}]}), self._special_ids)
                _in_deep_thread(lambda: _parse(self._vocabulary, prepared))
            except InvalidRequestError as error:
                return reason_of(error)
            except RecursionError:
                pass
            return ""

        kind = _kind(_WITHIN_LARK.sub("", reason_of(refused)))
        for schema in (schema for part in _parts(grammar) for schema in schemas_of(part)):
            if isinstance(schema, dict):
                place, fault = smallest_fault(schema, lambda part: _kind(reason_for(part)) == kind)
                if place and (reason := reason_for(fault)):
                    return refusal(f"in {place[:_NUM_ERROR_CHARS]}: {reason}")
        return refused

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        content = self._tokenizer_json()
        try:
            if not content:
                raise ValueError("it has no tokenizer.json")
            content, self._special_ids = hide_special_tokens(content)
            return LLTokenizer(content, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
        except ValueError as error:
            raise UnsupportedParameterError(
                f"This model's tokenizer allows no grammars and schemas ({_reason(str(error))})."
            ) from error


_EXPLAINED = {
    "NoExtensionBias": "it allows no text, or a part of it, such as a $ref, leads back to itself and to nothing else",
    "oneOf constraints": "oneOf is not supported where several of its schemas could allow the same document; use anyOf",
    "recursion limit exceeded": "more than about 120 objects and arrays are in each other; use $defs and $ref",
    "Unable to determine if regex is empty": "pattern, format and lengths of a string are too complex together; leave "
    "one of them out",
    "lark grammar too deeply nested": "more than about 28 parentheses are in each other; make rules of the inner ones",
    r'(?:at [\d()]+: )?(?:invalid regex ".*" \(in regex\): )?lookarounds not supported yet; \w+ in regex /(.*?)/?$': (
        r'the regular expression "\1" has \\b, \\B, ^ or $ inside, which are not supported'
    ),
    r'unknown special token: ("[^"]*").*': r"this model has no special token \1; write text in quotes",
    "Regex is empty": "pattern, format, lengths, const or enum of a string contradict each other",
    r"Resource '(?:json-schema:///)?(.*?)' is": r"$ref '\1' leads outside of the schema; put what it leads to under "
    "$defs",
    r"Unknown format: (.+)": r"Unknown format: \1; leave it out, or use date, time, date-time, duration, email, "
    "hostname, ipv4, ipv6, uri or uuid",
    "Expected f64 for": "a bound of a number (minimum, maximum, …) must be a number",
    "invalid multiple of": "multipleOf must be a number above 0",
    "Failed to generate regex for": "a bound of a number (minimum, maximum, exclusiveMinimum or exclusiveMaximum) has "
    "more than 18 digits; leave it out or use a smaller one",
}
"""What to say instead of the library's words that match, and of what follows."""
_WRONG_EXPRESSION = re.compile(
    r'(?:invalid regex "(.*)" \(in regex\): )?regex parse error:\n(?:    ([^\n]*)\n)?.*?^error: (.*?)$', re.S | re.M
)
_NUM_SHOWN_CHARS = 60
_POSITION = re.compile(r"(?:at )?(\d+)\(\d+\): ")
"""Line and column, in Lark's notation."""
_WITHIN_LARK = re.compile(r"(?:at )?\d+\(\d+\): failed to compile JSON schema: ")
_UNSATISFIABLE = "Unsatisfiable schema"
_PROCESSED = re.compile(r"\.? while processing \S+")
"""Through which references the library came to a fault; its place says more."""
_QUOTED_LINES = re.compile(r"\d+ \| ")
"""How an error's lines that quote the grammar begin. They may be baton's own, as of a tool's calls."""


def _prepared(grammar: str, special_ids: Mapping[str, int]) -> str:
    """The grammar after a check of its schemas, which are rewritten, and with references to special tokens by id, since
    they have other names in the vocabulary."""
    parts = _parts(grammar)
    check_bounds(parts)
    for part in parts:
        rewrite_schemas(part)
        if part.get("lark_grammar"):
            part["lark_grammar"] = refer_by_id(part["lark_grammar"], special_ids)
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The ``grammars`` of llguidance's JSON form."""
    try:
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError):  # in Lark's notation alone
        parts = [{"lark_grammar": grammar}]
    return parts


def _in_deep_thread(compile_grammar: Callable[[], LLMatcher]) -> LLMatcher:
    """Calls the function in a thread with a stack of :data:`_STACK_BYTES`."""
    outcome: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            outcome.set_result(compile_grammar())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.set_exception(error)

    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()


def _compile(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar, with its first mask: that may take a second, which later states are spared."""
    matcher = _parse(vocabulary, grammar)
    has_start = any(matcher.compute_bitmask())
    _check(matcher, grammar)
    if not has_start:
        raise InvalidRequestError("The grammar allows no text at all; check the schema or expression.")
    return matcher


def _parse(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar without its first mask."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())
    _check(matcher, grammar)
    return matcher


def _check(matcher: LLMatcher, grammar: str) -> None:
    if matcher.is_error():
        raise _refusal(matcher.get_error(), _parts(grammar))


def _limits() -> LLParserLimits:
    """Bounds of a grammar's time and memory: about half a second to compile it, 50 ms for a mask, and 30 MB.

    They leave room for an object with a thousand properties, or ten thousand choices.
    """
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_items_in_row=4_000,
        max_lexer_states=16_000,
        max_grammar_size=10_000,
        verbose_errors=False,
    )


def _kind(reason: str) -> str:
    """What is the same in the reasons for a fault and for the parts of a schema around it."""
    return _UNSATISFIABLE if _UNSATISFIABLE in reason else reason


def _refusal(text: str, parts: Sequence[Mapping[str, Any]] = ()) -> InvalidRequestError:
    """The refusal for an error of the library about the parts of a grammar."""
    reason = _reason(text)
    if position := _POSITION.match(reason):
        rules = (client_rule(part.get("lark_grammar") or "", int(position[1])) for part in parts)
        if rule := next(filter(None, rules), None):
            reason = f"in the rule {rule}: {reason[position.end() :]}"
    return refusal(f"{reason}.")


def _reason(text: str) -> str:
    """An error of the library, short and without its final period."""
    text = text.replace("<non-verbose/>", "")
    if wrong := _WRONG_EXPRESSION.search(text):
        quoted = wrong[2] or wrong[1] or ""
        end = '…"' if len(quoted) > _NUM_SHOWN_CHARS else '"'
        expression = f' "{quoted[:_NUM_SHOWN_CHARS]}{end}' if quoted else ""
        return f"the regular expression{expression} is wrong: {wrong[3]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = list(itertools.takewhile(lambda line: not _QUOTED_LINES.match(line), lines))
    reason = _PROCESSED.sub("", " ".join(told))[:_NUM_ERROR_CHARS].rstrip(".") or "no reason is given"
    for start, words in _EXPLAINED.items():
        if found := re.search(start, reason):
            return reason[: found.start()] + found.expand(words)
    return reason
