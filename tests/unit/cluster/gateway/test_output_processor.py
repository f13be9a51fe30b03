"""Stop strings, held-back text, logprobs and counts of one sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InternalError
from baton.core.request import FinishReason, TokenLogprobs
from cluster.gateway.formats.base import CallEnd
from cluster.gateway.output_processor import OutputDelta, OutputProcessor, StopConditions, StopMatcher
from cluster.requests.generation import TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.gateway.formats.samples import Sample, parser_of, whole

TOKENIZER = byte_level_tokenizer()
EOS = TOKENIZER.eos_token_id or 0


def chars(text: str) -> list[int]:
    """One token per byte of ``text``, so that tests decide where the cuts are."""
    return [token for char in text for token in TOKENIZER.encode(char, add_special_tokens=False)]


def processor(*strings: str, include: bool = False, min_tokens: int = 0, skip: bool = True) -> OutputProcessor:
    stop = StopConditions(strings, include_in_output=include, min_tokens=min_tokens)
    return OutputProcessor(TOKENIZER.detokenizer(skip_special_tokens=skip), stop)


def feed(target: OutputProcessor, token_ids: list[int], end: FinishReason = FinishReason.LENGTH) -> list[OutputDelta]:
    """One chunk per token, as plain decoding gives them, until the processor says stop."""
    deltas = []
    for index, token_id in enumerate(token_ids):
        reason = end if index == len(token_ids) - 1 else None
        logprobs = (TokenLogprobs(-float(index)),)
        deltas.append(target.process(TokenChunk((token_id,), logprobs, reason)))
        if target.is_finished:
            break
    return deltas


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_is_emitted_at_once_without_stop_strings() -> None:
    assert [delta.text for delta in feed(processor(), chars("abc"))] == ["a", "b", "c"]


@pytest.mark.parametrize("strings", [(), ("}x",)])
def test_a_stop_token_that_is_shown_completes_no_call(strings: tuple[str, ...]) -> None:
    stop = StopConditions(strings, include_in_output=True)
    target = OutputProcessor(TOKENIZER.detokenizer(skip_special_tokens=False), stop, parser_of(Sample("", "think", "")))
    text = '<tool_call>{"name": "now", "arguments": {"x": {}'
    events = [event for delta in feed(target, chars(text + "}"), FinishReason.STOP) for event in delta.events]
    message = whole(events)
    assert (message["content"], "tool_calls" in message) == (text + "}", False)


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
    deltas = feed(processor("xyz"), chars("axyb"))
    assert [delta.text for delta in deltas] == ["a", "", "", "xyb"]


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abxyz")])
def test_the_output_ends_exactly_at_the_stop_string(include: bool, expected: str) -> None:
    target = processor("xyz", include=include)
    deltas = feed(target, chars("abxyzcd"))
    assert text_of(deltas) == expected
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert target.num_completion_tokens == 5


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    target = processor("ell")
    token_ids = TOKENIZER.encode("hello", add_special_tokens=False)
    assert len(token_ids) == 1
    assert text_of(feed(target, token_ids)) == "h"
    assert target.finish_reason is FinishReason.STOP


def test_tokens_after_the_stop_string_in_a_chunk_are_not_counted() -> None:
    target = processor("b")
    delta = target.process(TokenChunk(tuple(chars("abcd"))))
    assert delta.text == "a"
    assert target.num_completion_tokens == 2


def test_held_back_text_is_emitted_when_the_sequence_ends() -> None:
    deltas = feed(processor("xyz"), chars("axy"))
    assert text_of(deltas) == "axy"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_the_stop_string_completed_first_wins() -> None:
    assert text_of(feed(processor("abc", "b"), chars("abc"))) == "a"
    assert text_of(feed(processor("bc", "abc"), chars("abc"))) == ""


def test_the_stop_string_is_named() -> None:
    assert [delta.stop_string for delta in feed(processor("abc", "b"), chars("xab"))] == ["", "", "b"]
    assert feed(processor("b"), chars("xy"))[-1].stop_string == ""


def test_a_stop_string_before_min_tokens_is_ordinary_text() -> None:
    target = processor("b", min_tokens=3)
    assert text_of(feed(target, chars("abcdb"))) == "abcd"
    assert target.num_completion_tokens == 5


def test_a_stop_string_completed_after_min_tokens_counts() -> None:
    assert text_of(feed(processor("bcd", min_tokens=4), chars("abcdef"))) == "a"


def test_a_stop_string_can_contain_multi_byte_characters() -> None:
    assert text_of(feed(processor("é!"), chars("café!x"))) == "caf"


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    half = [next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) == b"\xe2")]
    assert text_of(feed(processor(), chars("a") + half)) == "a\ufffd"


def test_the_end_token_is_counted_but_not_shown() -> None:
    target = processor()
    deltas = feed(target, [*chars("a"), EOS], FinishReason.STOP)
    assert text_of(deltas) == "a"
    assert target.num_completion_tokens == 2


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token_is_shown_only_on_request(include: bool, expected: str) -> None:
    assert text_of(feed(processor(include=include), chars("ab"), FinishReason.STOP)) == expected


def test_logprobs_wait_for_their_text() -> None:
    deltas = feed(processor("xyz"), chars("axyb"))
    assert [[entry.text_offset for entry in delta.entries] for delta in deltas] == [[0], [], [], [1, 2, 3]]


def test_logprobs_of_text_after_the_cut_are_dropped() -> None:
    deltas = feed(processor("xyz"), chars("abxyz"))
    assert [entry.logprobs.logprob for delta in deltas for entry in delta.entries] == [0.0, -1.0]


def test_logprobs_of_partial_characters_stay_in_order() -> None:
    deltas = feed(processor(), chars("a🚀b"))
    offsets = [entry.text_offset for delta in deltas for entry in delta.entries]
    num_parts = len(chars("🚀"))
    assert num_parts > 1
    assert offsets == [0, *[1] * num_parts, 2]


def test_without_logprobs_there_are_no_entries() -> None:
    assert processor().process(TokenChunk(tuple(chars("ab")))).entries == ()


def test_the_number_of_cached_tokens_is_kept() -> None:
    target = processor()
    target.process(TokenChunk(tuple(chars("a")), num_cached_tokens=32))
    target.process(TokenChunk(tuple(chars("b"))))
    assert target.num_cached_tokens == 32


def test_contract_violations_are_internal_errors() -> None:
    with pytest.raises(InternalError, match="has 2 tokens but 1 logprobs"):
        processor().process(TokenChunk((1, 2), (TokenLogprobs(0.0),)))
    with pytest.raises(InternalError, match="handed_off"):
        processor().process(TokenChunk((1,), None, FinishReason.HANDED_OFF))
    finished = processor()
    finished.process(TokenChunk((1,), None, FinishReason.LENGTH))
    with pytest.raises(InternalError, match="a sequence that had ended"):
        finished.process(TokenChunk((1,)))


def reference_cut(text: str, strings: list[str]) -> str:
    """The definition: grow the text character by character and stop at the first that completes a string."""
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in strings if text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@given(
    text=st.text("abc", max_size=30),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_the_result_does_not_depend_on_chunking(text: str, strings: list[str], cuts: list[int]) -> None:
    target = processor(*strings)
    token_ids = chars(text)
    shown = ""
    while token_ids and not target.is_finished:
        size = cuts.pop() if cuts else 1
        piece, token_ids = token_ids[:size], token_ids[size:]
        shown += target.process(TokenChunk(tuple(piece), None, None if token_ids else FinishReason.LENGTH)).text
    assert shown == reference_cut(text, strings)


@given(text=st.text("ab", max_size=30), strings=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_held_back_text_is_the_longest_prefix_of_a_stop_string(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(strings)
    matcher.push(text, armed=False)
    starts = [
        length
        for string in strings
        for length in range(1, len(string))
        if len(text) >= length and text.endswith(string[:length])
    ]
    assert matcher.num_held_chars == max(starts, default=0)


@pytest.mark.parametrize(
    ("stop", "end", "is_call"),
    [
        ("", FinishReason.STOP, True),
        ("", FinishReason.LENGTH, False),
        ("</function>", FinishReason.STOP, True),
        ("<parameter=days>", FinishReason.STOP, False),
    ],
)
def test_a_call_is_whole_without_its_last_tag_only_if_that_is_what_ended_it(
    stop: str, end: FinishReason, is_call: bool
) -> None:
    conditions = StopConditions((stop,) if stop else ())
    target = OutputProcessor(TOKENIZER.detokenizer(), conditions, parser_of(Sample("", "qwen_xml", "")))
    text = f"<tool_call><function=get_weather><parameter=city>Oslo</parameter>{stop}"
    token_ids = [*chars(text), EOS] if end is FinishReason.STOP else chars(text)
    events = [event for delta in feed(target, token_ids, end) for event in delta.events]
    assert (CallEnd() in events) == is_call
