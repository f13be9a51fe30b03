"""The form that a tokenizer describes itself: the ``response_template`` of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cluster.gateway.formats.base import Arguments, CallEnd, CallStart, Event, Function, Reasoning, Steps, Text, as_json
from cluster.gateway.formats.source import Source

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_CALLS_FIELD = "tool_calls"
# What transformers raises for text that does not fit the template.
_MISFITS = (ValueError, TypeError, LookupError, AttributeError)


def parse_with_template(source: Source, template: Any, prompt: str, functions: Sequence[Function]) -> Steps:
    """Parses an output with transformers' parser. Text that does not fit the template becomes content.

    Args:
        prompt: the end of the prompt, which may hold the beginning of the message.
    """
    from transformers.utils.chat_parsing import ResponseParser

    tools: list[Any] = [{"name": function.name, "parameters": dict(function.parameters)} for function in functions]
    parser = ResponseParser(template, prefix=prompt, tools=tools)
    source.in_reasoning = _ends_in_reasoning(parser.initial_events)
    pending = ""  # what was read and not yielded
    close = template["fields"].get(_CALLS_FIELD, {}).get("close", ())
    marks = (close,) if isinstance(close, str) else close
    try:
        while not (yield from source.at_end()):
            if source.is_marked and (yield from source.skip_cut(*marks, or_whole=False)):
                break
            char = source.take(1)  # so that an error loses no events
            pending += char
            for event in _events(parser.feed(char), source):
                yield event
                pending = ""
        _, found = parser.finalize()
        for event in _events(found, source):
            yield event
            pending = ""
    except _MISFITS:
        source.in_reasoning = False
        yield Text(pending)
        yield from source.until((), Text, trims=False)


def _events(found: Iterable[dict[str, Any]], source: Source) -> Iterator[Event]:
    for event in found:
        field, kind = event["field"], event["type"]
        is_reasoning = field in _REASONING_FIELDS
        source.in_reasoning = is_reasoning and kind != "region_close"
        if field == _CALLS_FIELD:
            if kind == "region_open":
                source.mark()
            elif kind == "region_close":
                source.since_mark()
                yield from _calls(event["value"])
        elif kind == "region_chunk":
            yield Reasoning(event["text"]) if is_reasoning else Text(event["text"])


def _calls(value: Any) -> Iterator[Event]:
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else as_json(arguments)
        yield CallStart(str(function["name"]))
        yield Arguments(text)
        yield CallEnd()


def _ends_in_reasoning(events: Sequence[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["field"] in _REASONING_FIELDS and events[-1]["type"] != "region_close"
