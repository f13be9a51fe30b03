"""How one served model writes calls and reasoning, and what its chat template expects of earlier ones."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.core.errors import UnsupportedParameterError
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.formats.base import CallRule, Function, OutputParser, Steps
from cluster.gateway.formats.calls import plain_text, whole_calls
from cluster.gateway.formats.conversation import (
    SHORT_ID_CHARS,
    CallIds,
    Message,
    calls_as_text,
    find_style,
    lists_tools,
    with_tools_listed,
)
from cluster.gateway.formats.grammar import ANY_TEXT, literal
from cluster.gateway.formats.harmony import Harmony
from cluster.gateway.formats.registry import AUTO, DEFAULT_TOOL_FORMAT, NONE, reasoning_format, tool_format
from cluster.gateway.formats.response_template import parse_with_template
from cluster.gateway.formats.source import Source

_NUM_PROMPT_TOKENS = 64
"""Enough of a prompt's end to hold the beginning of the assistant's message that the template writes."""


class Dialect:
    """The tool and reasoning formats of one model.

    A tokenizer's ``response_template`` parses outputs where both formats are chosen automatically. Constrained outputs
    have the format that the chat template shows, and are parsed as such.

    Args:
        tool_parser: a name of :data:`~cluster.gateway.formats.registry.TOOL_FORMATS`, ``auto`` or ``none``.
        reasoning_parser: a name of :data:`~cluster.gateway.formats.registry.REASONING_FORMATS`, ``auto`` or ``none``.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.tool_chat_template
        self._lists_tools = lists_tools(tokenizer)
        self._style = find_style(tokenizer)
        knows_calls = self._lists_tools or self._style is not None
        is_auto = tool_parser == reasoning_parser == AUTO
        self._response_template = tokenizer.response_template if is_auto else None
        default = DEFAULT_TOOL_FORMAT if self._response_template is None else NONE
        self._tools = tool_format(tool_parser, template if knows_calls else "", default)
        self._is_framed = isinstance(self._tools, Harmony)
        self._reasoning = None if self._is_framed else reasoning_format(reasoning_parser, template)

    @property
    def allows_tools(self) -> bool:
        return self._tools is not None or self._response_template is not None

    def template_inputs(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[dict[str, Any]] | None]:
        """Messages and tools for the chat template, from those of a request."""
        if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            style = self._style
            messages = style.apply(messages, thinks_aside=self._is_framed) if style else calls_as_text(messages)
        if tools and self._tools is not None and not self._lists_tools:
            return with_tools_listed(messages, tools, self._tools.example), None
        return messages, tools or None

    def new_call_id(self) -> str:
        if self._style is not None and self._style.ids is CallIds.SHORT:
            return secrets.token_hex(SHORT_ID_CHARS)[:SHORT_ID_CHARS]
        return f"call_{secrets.token_hex(12)}"

    def shown_token_ids(self) -> frozenset[int]:
        """Special tokens that the parser must see."""
        if self._response_template is not None:
            return self._tokenizer.special_ids
        marks = (*(self._tools.markers if self._tools else ()), *(self._reasoning.markers if self._reasoning else ()))
        ids = map(self._tokenizer.added_id, marks)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def prompt_end(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids[-_NUM_PROMPT_TOKENS:], skip_special_tokens=False)

    def needs_parser(self, functions: Sequence[Function]) -> bool:
        """Whether the output is more than content."""
        return bool(functions or self._reasoning or self._is_framed or self._response_template)

    def parser(
        self,
        functions: Sequence[Function],
        prompt_end: str,
        *,
        is_single: bool = False,
        is_constrained: bool = False,
        holds_calls: bool = False,
    ) -> OutputParser:
        """A parser of one output.

        Args:
            functions: those that the model may call; without any, calls are content.
            prompt_end: :meth:`prompt_end` of the request's prompt.
            is_single: the output ends with its first call.
            is_constrained: the output follows a :meth:`grammar` of calls.
            holds_calls: see :func:`whole_calls`; otherwise the arguments of a call come as they are written.
        """
        source = Source()
        steps = self._steps(source, functions, prompt_end, is_constrained)
        return OutputParser(source, whole_calls(steps) if holds_calls else steps, is_single)

    def _steps(self, source: Source, functions: Sequence[Function], prompt_end: str, is_constrained: bool) -> Steps:
        if self._response_template is not None and not is_constrained:
            yield from parse_with_template(source, self._response_template, prompt_end, functions)
            return
        if self._reasoning is not None:
            yield from self._reasoning.parse(source, self._reasoning.begins_in(prompt_end))
        if self._tools is not None and (functions or self._is_framed):
            yield from self._tools.parse(source, functions)
        else:
            yield from plain_text(source)

    def grammar(self, rule: CallRule | None, answer: str, prompt_end: str) -> str:
        """Grammar of a whole output, its reasoning included, in llguidance's JSON form.

        Args:
            rule: what the output's calls must follow; ``None`` if there are none.
            answer: grammar in the same form of an answer without a call; empty if it is any text.

        Raises:
            UnsupportedParameterError: there are calls, whose format only the tokenizer's ``response_template`` knows.
        """
        rule = CallRule((), is_required=False, is_single=True) if rule is None else rule
        answers: list[dict[str, Any]] = []
        if answer and not rule.is_required:
            rule = replace(rule, answer="@answer")
            answers = [{**json.loads(answer)["grammars"][0], "name": "answer"}]
        reasoning = self._reasoning
        if reasoning is None or prompt_end.rstrip().endswith(reasoning.close):
            lark = f"start: calls\n{self._calls_grammar(rule)}"
        else:
            thinking = reasoning.grammar(self._token, reasoning.begins_in(prompt_end))
            lark = f"start: reasoning calls\n{thinking}{self._calls_grammar(rule)}"
        return json.dumps({"grammars": [{"lark_grammar": lark}, *answers]})

    def _calls_grammar(self, rule: CallRule) -> str:
        if not rule.functions and not self._is_framed:
            return f"calls: {rule.answer or ANY_TEXT}\n"
        if self._tools is None:
            raise UnsupportedParameterError(
                "tool_choice required, a named function and strict functions are not supported for this model: its "
                "chat template shows no known form of calls. Name one in router.tool_parser.",
                param="tools",
            )
        return self._tools.grammar(rule, self._token)

    def _token(self, text: str) -> str:
        token_id = self._tokenizer.added_id(text)
        if token_id is None:
            return literal(text)
        if self._tokenizer.is_special(token_id):
            return f"<[{token_id}]>"
        return f"(<[{token_id}]> | {literal(text)})"  # llguidance may take it for special by its look
