"""``{"name": …, "parameters": {…}}``, with or without ``<|python_tag|>``: Llama 3."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.gateway.formats.base import CallRule, Function, Steps, TokenRefs
from cluster.gateway.formats.calls import Attempt, marked_calls, object_call
from cluster.gateway.formats.grammar import many, object_call_rules, unmarked_rule
from cluster.gateway.formats.source import Source

TAG = "<|python_tag|>"


class LlamaJson:
    """Calls have no mark of their own, so that only objects which name a known function count."""

    name = "llama_json"
    markers = (TAG,)
    example = '{"name": <function-name>, "parameters": <args-json-object>}'

    def parse(self, source: Source, functions: Sequence[Function]) -> Steps:
        names = {function.name for function in functions}

        def read(opener: str) -> Attempt:
            if opener == TAG:
                yield from source.skip(TAG)
                yield from source.skip_space()
            is_whole = yield from object_call(source, names)
            if is_whole:
                yield from source.skip_space()
                yield from source.skip(";")
            return is_whole

        return marked_calls(source, (TAG, "{"), read)

    def grammar(self, rule: CallRule, token: TokenRefs) -> str:
        calls = many(rule, "body", '"; " body')
        if rule.answer:  # an object, too: the tag tells them apart
            calls = f"{token(TAG)} {calls}"
        return unmarked_rule(rule, calls, "{") + object_call_rules(rule, "parameters")
