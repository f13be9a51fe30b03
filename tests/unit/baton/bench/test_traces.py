"""Both public trace formats, and replaying the prefixes that their requests shared."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.lengths import LengthLimits, check_room, make_limits, scale_to_longest
from baton.bench.prompts import PromptWriter
from baton.bench.traces import TraceRequest, cut_trace, read_trace
from baton.bench.workload import TraceWorkload, block_segments
from baton.core.errors import ConfigError

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 3500, "input_length": 1030, "output_length": 0, "hash_ids": [7, 8, 10]},
    {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [11, 12]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:04.0319600,110,27
"""


@pytest.fixture
def mooncake(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in MOONCAKE) + "\n")
    return file


@pytest.fixture
def azure(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    return file


def writer() -> PromptWriter:
    return PromptWriter([f"w{number}" for number in range(5000)], 1.0, 0, "salt", "words")


def test_mooncake_times_are_milliseconds_from_zero(mooncake):
    requests = read_trace(mooncake)
    assert [request.at_s for request in requests] == [0.0, 1.0, 2.5]
    assert [request.hash_ids for request in requests] == [(7, 8, 9), (11, 12), (7, 8, 10)]
    assert requests[2].output_tokens == 1  # none cannot be asked for


def test_azure_times_have_seven_decimals(azure):
    requests = read_trace(azure)
    assert [request.at_s for request in requests] == pytest.approx([0.0, 0.052, 60.052], abs=1e-6)
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [(4808, 10), (3180, 8), (110, 27)]


def test_a_part_is_selected_by_the_clock_of_the_trace(mooncake):
    (only,) = cut_trace(read_trace(mooncake), 0.5, 1.0)
    assert only.at_s == 0.5
    assert only.input_tokens == 600
    with pytest.raises(ConfigError, match="no request arrived"):
        cut_trace(read_trace(mooncake), 100.0, 1.0)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('{"timestamp": 1, "input_length": 2}', "line 1 of"),
        ('{"timestamp": 1, "input_length": -2, "output_length": 1}', "a negative number"),
        ("a,b\n1,2\n", "missing: ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 of"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "contains no requests"),
        ("", "neither Mooncake JSONL nor a CSV"),
    ],
)
def test_an_invalid_trace_is_refused_with_the_line(tmp_path, text, fragment):
    file = tmp_path / "broken"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert fragment in caught.value.message


def test_equal_hash_ids_give_equal_text_and_others_do_not(mooncake):
    first, other, second, *_ = _texts(TraceWorkload(writer(), read_trace(mooncake), LengthLimits(), "t"), 3)
    assert [len(text) for text in (first, other, second)] == [1100, 600, 1030]
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:1030]
    assert other[:50] != first[:50]


def test_sharing_survives_scaling(mooncake):
    first, _, second = _texts(TraceWorkload(writer(), read_trace(mooncake), LengthLimits(input_scale=0.1), "t"), 3)
    assert (len(first), len(second)) == (110, 103)
    assert first[:102] == second[:102]  # 1,024 tokens of two blocks
    assert first[:103] != second[:103]


def test_truncated_prompts_stay_different(mooncake):
    limits = LengthLimits(max_input=600)
    first, _, second = _texts(TraceWorkload(writer(), read_trace(mooncake), limits, "t"), 3)
    assert len(first) == len(second) == 600
    assert first[:300] == second[:300]
    assert first != second


def test_a_chat_template_keeps_the_end_of_the_text(mooncake):
    """Of the last block's 6 tokens a template of 20 leaves none: the end of the text is still the last block's."""
    templated = PromptWriter(writer().words, 1.0, 20, "salt", "words")
    first, _, second = _texts(TraceWorkload(templated, read_trace(mooncake), LengthLimits(max_input=1030), "t"), 3)
    assert len(first) == len(second) == 1010
    assert first != second


def test_another_stage_starts_elsewhere_in_the_trace():
    trace = [TraceRequest(float(number), 10 + number, 5) for number in range(100)]
    workload = TraceWorkload(writer(), trace, LengthLimits(), "t")
    stages = [[spec.input_tokens for spec in itertools.islice(workload.requests(stage), 10)] for stage in range(5)]
    assert stages[0][0] == 10
    assert len({length for lengths in stages for length in lengths}) == 50


def test_every_lap_and_stage_misses_every_cache(mooncake):
    workload = TraceWorkload(writer(), read_trace(mooncake), LengthLimits(), "t")
    texts = _texts(workload, 6)
    assert texts[0][:50] != texts[3][:50]
    assert next(workload.requests(1)).prompt.split()[:50] != texts[0][:50]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12, unique=True),
    st.floats(0.05, 600),
    st.integers(1, 4000),
)
def test_segments_always_have_the_requested_length(hash_ids, block_tokens, input_tokens):
    segments = block_segments(hash_ids, block_tokens, input_tokens, "k")
    assert sum(segment.tokens for segment in segments) == input_tokens
    assert all(segment.tokens > 0 for segment in segments)


class TestLimits:
    def test_scaling_comes_before_clipping(self):
        limits = make_limits("0.5", 2.0, 100, 50, None)
        assert limits.fit(150, 20) == (75, 40, False)
        assert limits.fit(500, 60) == (100, 50, True)

    def test_prompts_are_shortened_in_favour_of_answers(self):
        assert make_limits("1", 1.0, None, None, 2048).fit(2000, 300) == (1748, 300, True)
        assert make_limits("1", 1.0, None, None, 100).fit(50, 300) == (1, 99, True)

    @given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(2, 10_000), st.floats(0.001, 2))
    def test_requests_within_the_limits_always_fit(self, input_tokens, output_tokens, context, scale):
        fitted = make_limits(str(scale), scale, None, None, context).fit(input_tokens, output_tokens)
        assert fitted[0] >= 1
        assert fitted[1] >= 1
        assert fitted[0] + fitted[1] <= context

    def test_auto_fits_the_longest_request(self):
        limits = scale_to_longest(make_limits("auto", 1.0, None, 100, 1100), [10, 4000])
        assert limits.fit(4000, 100) == (1000, 100, False)
        assert limits.fit(40, 100)[0] == 10
        with pytest.raises(ConfigError, match="needs a limit"):
            scale_to_longest(LengthLimits(), [1])


def test_a_request_without_hash_ids_shares_nothing():
    trace = [TraceRequest(0.0, 30, 5), TraceRequest(1.0, 30, 5)]
    first, second = _texts(TraceWorkload(writer(), trace, LengthLimits(), "t"), 2)
    assert not set(first) & set(second) or first[:2] != second[:2]


def _texts(workload, count):
    source = workload.requests(0)
    return [next(source).prompt.split() for _ in range(count)]


class TestRoom:
    @pytest.mark.parametrize(
        ("lengths", "fragment"),
        [
            ((4096.0, 10.0), "--input: a prompt of 4096 tokens does not fit into the context of 2048"),
            ((100.0, 2048.0), "--output: an answer of 2048 tokens does not fit into the context of 2048"),
            ((2000.0, 49.0), "2000 tokens and an answer of 49 do not fit into the context of 2048"),
        ],
    )
    def test_requests_that_cannot_fit_are_refused(self, lengths, fragment):
        with pytest.raises(ConfigError, match="--context 2048") as caught:
            check_room(LengthLimits(), *lengths, 2048)
        assert fragment in caught.value.message

    def test_limits_make_requests_fit(self):
        check_room(LengthLimits(), 2000.0, 48.0, 2048)
        check_room(LengthLimits(context=2048), 4096.0, 10.0, 2048)
        check_room(LengthLimits(input_scale=0.1), 4096.0, 10.0, 2048)
        check_room(LengthLimits(), 4096.0, 10.0, None)

    def test_lengths_are_bounded_without_a_context(self):
        with pytest.raises(ConfigError, match="20000000 tokens are more than 10000000"):
            check_room(LengthLimits(input_scale=1e5), 200.0, 10.0, None)
