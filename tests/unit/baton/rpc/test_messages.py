"""Requests, tokens and lifecycle events cross the wire unchanged; what makes no valid request is refused by name."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.core.request import MAX_LOGPROBS, FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from baton.core.request_ids import MAX_ID_CHARS
from baton.core.timeline import Event
from baton.rpc import conversions as messages
from baton.rpc.wire import worker_pb2

token_ids = st.integers(0, 2**32 - 1)
visible = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
float32 = st.floats(-100, 100, width=32)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 100_000))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.floats(0, 100)),
        top_k=draw(st.integers(-1, 1000)),
        top_p=draw(st.floats(0, 1)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0.01, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=tuple(sorted(draw(st.dictionaries(token_ids, float32, max_size=5)).items())),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=5))),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        prompt_logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(sampling_params())
def test_parameters_round_trip(params: SamplingParams) -> None:
    wire = messages.pack_params(params).SerializeToString()
    assert messages.unpack_params(worker_pb2.SamplingParams.FromString(wire)) == params


@given(
    st.text(visible, min_size=1, max_size=MAX_ID_CHARS),
    st.lists(token_ids, min_size=1),
    st.lists(token_ids),
    sampling_params(),
    st.text(max_size=4),
)
def test_sequences_round_trip(
    request_id: str, prompt: list[int], output: list[int], params: SamplingParams, salt: str
) -> None:
    wire = messages.pack_sequence(request_id, prompt, params, output, cache_salt=salt).SerializeToString()
    request = messages.unpack_sequence(worker_pb2.Sequence.FromString(wire), frozenset({3}), 12.5)
    assert (request.request_id, request.prompt_token_ids, request.output_token_ids) == (request_id, prompt, output)
    assert (request.params, request.eos_token_ids, request.arrival_s) == (params, frozenset({3}), 12.5)
    assert request.cache_salt == salt


@pytest.mark.parametrize("request_id", ["", "a b", "a\nFAKE LINE", "\x1b[31m", "é", "a" * (MAX_ID_CHARS + 1)])
def test_ids_that_could_forge_log_lines_are_refused(request_id: str) -> None:
    message = messages.pack_sequence(request_id, [1], SamplingParams())
    with pytest.raises(InvalidRequestError, match="request_id must have 1 to 256 visible"):
        messages.unpack_sequence(message, frozenset(), 0.0)


logprob_entries = st.builds(TokenLogprobs, float32, st.lists(st.tuples(token_ids, float32), max_size=3).map(tuple))


@given(
    st.lists(st.tuples(token_ids, logprob_entries), max_size=4),
    st.booleans(),
    st.none() | st.sampled_from(FinishReason),
    st.integers(0, 10_000),
)
def test_outputs_round_trip(
    tokens: list[tuple[int, TokenLogprobs]], with_logprobs: bool, reason: FinishReason | None, cached: int
) -> None:
    logprobs = tuple(entry for _, entry in tokens) if with_logprobs and tokens else None
    output = TokenOutput("request", tuple(token for token, _ in tokens), logprobs, reason, cached)
    batch = worker_pb2.TokenBatch.FromString(messages.pack_output(output).SerializeToString())
    assert tuple(batch.token_ids) == output.token_ids
    assert messages.unpack_logprobs(batch) == logprobs
    assert messages.unpack_finish_reason(batch) is reason
    assert batch.num_cached_tokens == cached


def test_drafts_are_reported_with_their_method() -> None:
    output = TokenOutput("request", (1, 2), num_drafted=3, num_accepted=1, drafted_by="eagle3")
    batch = worker_pb2.TokenBatch.FromString(messages.pack_output(output).SerializeToString())
    assert (batch.num_drafted, batch.num_accepted, batch.drafted_by) == (3, 1, "eagle3")
    assert not messages.pack_output(TokenOutput("request", (1,))).drafted_by


@given(st.dictionaries(st.sampled_from(Event), st.floats(0, 1e9)))
def test_events_round_trip(events: dict[Event, float]) -> None:
    assert messages.unpack_events(messages.pack_events(events)) == events


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": -0.5}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes: dict[str, object], param: str) -> None:
    good = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    with pytest.raises(InvalidRequestError) as caught:
        messages.unpack_params(worker_pb2.SamplingParams(**{**good, **changes}))
    assert caught.value.param == param


def test_a_sequence_needs_a_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="at least one prompt token"):
        messages.unpack_sequence(messages.pack_sequence("request", [], SamplingParams()), frozenset(), 0.0)


@given(st.binary(max_size=200))
def test_every_message_is_a_valid_request_or_refused(data: bytes) -> None:
    message = worker_pb2.Sequence()
    try:
        message.ParseFromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own error; gRPC answers it before any of our code runs
        return
    try:
        request = messages.unpack_sequence(message, frozenset(), 0.0)
    except InvalidRequestError:
        return
    assert isinstance(request, Request)


def test_a_logit_bias_is_as_precise_as_float32() -> None:
    packed = messages.pack_params(SamplingParams(logit_bias=((7, 0.1),)))
    ((_, bias),) = messages.unpack_params(packed).logit_bias
    assert struct.pack("f", bias) == struct.pack("f", 0.1)
