"""Parsers of all families give the same message however the text is cut."""

from __future__ import annotations

from itertools import combinations

import pytest

from cluster.gateway.formats.base import OutputParser
from cluster.gateway.formats.calls import whole_calls
from tests.unit.cluster.gateway.formats.samples import (
    SAMPLES,
    THOUGHTS,
    Sample,
    parsed,
    parser_of,
    streamed,
    whole,
)

ALL = pytest.mark.parametrize("sample", [*SAMPLES, *THOUGHTS], ids=lambda sample: sample.name)


@ALL
def test_a_sample_means_what_it_says(sample: Sample) -> None:
    message = whole(parsed(parser_of(sample), [sample.text]))
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    assert calls == sample.calls
    assert (message["content"] or "") == sample.content
    assert message.get("reasoning_content", "") == sample.reasoning


def check_cuts(sample: Sample, step: int) -> None:
    """Compares all single cuts, all pairs of cuts at multiples of ``step``, and single characters with no cut."""
    text, end = sample.text, len(sample.text)
    events = parsed(parser_of(sample), [text])
    expected, joined = whole(events), streamed(events)
    pairs = combinations(range(0, end + 1, step), 2)
    for places in ((), *((cut,) for cut in range(end + 1)), *pairs, tuple(range(end + 1))):
        pieces = [text[start:stop] for start, stop in zip((0, *places), (*places, end), strict=True)]
        events = parsed(parser_of(sample), pieces)
        assert whole(events) == expected, pieces
        assert streamed(events) == joined, pieces


@ALL
def test_cuts_do_not_change_the_message(sample: Sample) -> None:
    check_cuts(sample, step=1 + len(sample.text) // 80)


@pytest.mark.thorough(covered_by="test_cuts_do_not_change_the_message")
@ALL
def test_pairs_of_cuts_do_not_change_the_message(sample: Sample) -> None:
    check_cuts(sample, step=1)


WHOLE = [sample for sample in SAMPLES if "broken" not in sample.name and "cut off" not in sample.name]


@pytest.mark.parametrize("sample", WHOLE, ids=lambda sample: sample.name)
def test_a_stream_of_whole_calls_is_the_whole_message(sample: Sample) -> None:
    events = parsed(parser_of(sample), list(sample.text))
    message = whole(events)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert list(streamed(events)["calls"].values()) == functions
    assert streamed(events)["content"] == (message["content"] or "")


@ALL
def test_a_stream_of_calls_that_are_held_is_the_whole_message_wherever_it_ends(sample: Sample) -> None:
    for end in range(len(sample.text) + 1):
        free, text = parser_of(sample), sample.text[:end]
        events = parsed(OutputParser(free.source, whole_calls(free.steps)), [text])
        message, joined = whole(parsed(parser_of(sample), [text])), streamed(events)
        assert list(joined["calls"].values()) == [call["function"] for call in message.get("tool_calls", ())]
        assert joined["content"] == (message["content"] or "")
        assert joined["reasoning"] == message.get("reasoning_content", "")


@pytest.mark.parametrize("sample", [sample for sample in WHOLE if sample.calls], ids=lambda sample: sample.name)
def test_marks_behind_a_call_are_no_content_wherever_they_are_cut(sample: Sample) -> None:
    is_called = False
    for end in range(len(sample.text) + 1):
        parser = parser_of(sample)
        events = parser.push(sample.text[:end]) + parser.finish("")
        message = whole(events)
        is_called = is_called or len(message.get("tool_calls", ())) == len(sample.calls)
        if is_called:
            assert (message["content"] or "") == sample.content
            assert streamed(events)["content"] == sample.content


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_c'),
        ("glm", "<tool_call>now\n</tool"),
        ("qwen_xml", "<tool_call><function=now>\n</func"),
        ("kimi", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_b"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}][TOOL'),
        ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL"),
        ("pythonic", "[now()]<|python_e"),
        ("llama_json", '{"name": "now", "parameters": {}}; <|pyth'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁be"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>{}<|ca"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>\n'),
        ("glm", "<tool_call>now\n</tool_call><tool_call>"),
        ("kimi", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>"),
        ("qwen_xml", "<tool_call><function=now>\n</function>\n</tool_call>\n<tool_call>\n"),
        ("llama_json", '{"name": "now", "parameters": {}}; <|python_tag|>'),
        ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"),
    ],
)
def test_the_beginning_of_a_mark_behind_a_call_is_no_content(form: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = parser_of(Sample("", form, text))
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish("")
        assert (whole(events)["content"], len(whole(events)["tool_calls"])) == (None, 1)
        assert streamed(events) == {"content": "", "reasoning": "", "calls": {0: {"name": "now", "arguments": "{}"}}}


@ALL
def test_a_stop_string_that_is_shown_changes_no_call(sample: Sample) -> None:
    for end in range(1, len(sample.text) + 1):
        for start in {max(0, end - length) for length in (1, 3, 12, end)}:
            text, stop = sample.text[:start], sample.text[start:end]
            bare, free = parser_of(sample), parser_of(sample)
            shown = OutputParser(free.source, whole_calls(free.steps))
            message = whole(bare.push(text) + bare.finish(stop))
            events = shown.push(text) + shown.finish(stop, stop)
            found, calls = whole(events), [call["function"] for call in message.get("tool_calls", ())]
            assert [call["function"] for call in found.get("tool_calls", ())] == calls, (text, stop)
            assert list(streamed(events)["calls"].values()) == calls
            assert streamed(events)["content"] == (found["content"] or "")
            assert (found["content"] or "").startswith((message["content"] or "").rstrip()), (text, stop)


def test_a_call_that_breaks_is_content_of_a_whole_message_and_ends_in_a_stream() -> None:
    text = 'a <tool_call>{"name": "now", "arguments": {"x": y}}'
    events = parsed(parser_of(Sample("", "hermes", text)), [text])
    assert whole(events)["content"] == text
    joined = streamed(events)
    assert joined["calls"] == {0: {"name": "now", "arguments": '{"x": '}}
    assert joined["content"] == "ay}}"


@pytest.mark.parametrize(
    ("cut_by", "is_call"), [(None, True), ("</function>\n", True), ("<parameter", False), ("", False)]
)
def test_a_call_without_its_end_is_one_only_if_the_model_left_the_end_out(cut_by: str | None, is_call: bool) -> None:
    text = "<tool_call><function=get_weather><parameter=city>Oslo</parameter>"
    parser = parser_of(Sample("", "qwen_xml", text))
    message = whole(parser.push(text) + parser.finish(cut_by))
    assert ("tool_calls" in message, message["content"]) == (is_call, None if is_call else text)


def test_arguments_are_streamed_as_they_arrive() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "'
    events = parser_of(Sample("", "hermes", "")).push(text)
    assert streamed(events)["calls"] == {0: {"name": "get_weather", "arguments": '{"city": "'}}
    events = parser_of(Sample("", "qwen_xml", "")).push("<function=get_weather><parameter=city>\nLong")
    assert streamed(events)["calls"] == {0: {"name": "get_weather", "arguments": '{"city": "Long'}}


@pytest.mark.parametrize("text", ["Hm</think>Hi", "\nHm\n</think>\n\nHi"])
def test_reasoning_that_began_in_the_prompt(text: str) -> None:
    sample = THOUGHTS[0]
    for cut in range(len(text)):
        message = whole(parsed(parser_of(sample, is_open=True), [text[:cut], text[cut:]]))
        assert (message["reasoning_content"], message["content"]) == ("Hm", "Hi")


def test_deep_nesting_in_arguments_is_content() -> None:
    text = '<tool_call>{"name": "now", "arguments": ' + '{"a": [' * 30_000
    assert whole(parsed(parser_of(Sample("", "hermes", text)), [text]))["content"] == text


def test_text_that_failed_as_a_call_is_not_read_again() -> None:
    for form, mark in [("hermes", "<tool_call>"), ("llama_json", '{"name": '), ("pythonic", "[now("), ("mistral", "[")]:
        text = mark * 2000
        assert whole(parsed(parser_of(Sample("", form, text)), list(text)))["content"] == text
