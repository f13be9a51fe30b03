"""Log probabilities of prompts cross the wire in bounded messages; damaged ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InternalError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.rpc.prompt_logprobs import MAX_PART_BYTES, PromptLogprobsReader, pack_prompt_logprobs
from baton.rpc.wire import worker_pb2

VOCAB_SIZE = 50_000
Message = worker_pb2.PromptLogprobs


def random_logprobs(num_tokens: int, num_top: int) -> PromptLogprobs:
    random = np.random.default_rng(num_tokens)
    count = num_tokens - 1
    return PromptLogprobs(
        -random.random(count, np.float32),
        random.integers(1, VOCAB_SIZE + 1, count, np.int32),
        random.integers(0, VOCAB_SIZE, (count, num_top), np.int32),
        -random.random((count, num_top), np.float32),
    )


def read(messages: list[Message], num_tokens: int, num_top: int | None) -> PromptLogprobs | None:
    reader = PromptLogprobsReader(num_tokens, num_top, VOCAB_SIZE)
    for message in messages:
        reader.take(Message.FromString(message.SerializeToString()))
    return reader.finish()


@given(st.sampled_from([1, 2, 3, 40, 5_000, 70_000]), st.sampled_from([0, 1, 20]))
def test_they_round_trip_in_small_messages(num_tokens: int, num_top: int) -> None:
    sent = random_logprobs(num_tokens, num_top)
    messages = list(pack_prompt_logprobs(sent))
    assert all(message.ByteSize() < MAX_PART_BYTES + 100 for message in messages)
    found = read(messages, num_tokens, num_top)
    assert found is not None
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(found, name), getattr(sent, name))


def test_minus_infinity_is_a_log_probability() -> None:
    sent = random_logprobs(3, 1)
    sent.logprobs[0] = -np.inf
    found = read(list(pack_prompt_logprobs(sent)), 3, 1)
    assert found is not None
    assert found.logprobs[0] == -np.inf


def test_without_any_there_is_no_message() -> None:
    assert list(pack_prompt_logprobs(None)) == []
    assert read([], 9, None) is None


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.MergeFrom(Message(start=1)),
        lambda m: m.MergeFrom(Message(logprobs=b"")) or m.ClearField("logprobs"),
        lambda m: m.MergeFrom(Message(logprobs=floats(-1, -1, -1))),
        lambda m: m.MergeFrom(Message(logprobs=floats(-1, 0.5))),
        lambda m: m.MergeFrom(Message(logprobs=floats(-1, float("nan")))),
        lambda m: m.MergeFrom(Message(logprobs=floats(-1, -1)[:-1])),
        lambda m: m.MergeFrom(Message(ranks=ints(0, 1))),
        lambda m: m.MergeFrom(Message(ranks=ints(1, VOCAB_SIZE + 1))),
        lambda m: m.MergeFrom(Message(ranks=ints(1))),
        lambda m: m.MergeFrom(Message(top_ids=ints(0, -1))),
        lambda m: m.MergeFrom(Message(top_ids=ints(0, VOCAB_SIZE))),
        lambda m: m.MergeFrom(Message(top_ids=ints(0, 1, 2))),
        lambda m: m.MergeFrom(Message(top_logprobs=floats(-1, float("inf")))),
        lambda m: m.MergeFrom(Message(top_logprobs=b"")) or m.ClearField("top_logprobs"),
    ],
)
def test_damaged_messages_are_refused(damage: Callable[[Message], object]) -> None:
    (message,) = pack_prompt_logprobs(random_logprobs(3, 1))
    damage(message)
    with pytest.raises(InternalError, match="A worker sent"):
        read([message], 3, 1)


def test_missing_repeated_and_unwanted_messages_are_refused() -> None:
    (message,) = pack_prompt_logprobs(random_logprobs(3, 1))
    with pytest.raises(InternalError, match="0 of 2 tokens"):
        read([], 3, 1)
    with pytest.raises(InternalError, match="2 of 2 were there"):
        read([message, message], 3, 1)
    with pytest.raises(InternalError, match="did not ask"):
        read([message], 3, None)


@given(st.binary(max_size=60))
def test_any_bytes_are_numbers_or_refused(data: bytes) -> None:
    message = Message(logprobs=floats(-1, -1), ranks=ints(1, 1), top_ids=data[:8], top_logprobs=data[8:])
    try:
        found = read([message], 3, 1)
    except InternalError:
        return
    assert found is not None
    assert 0 <= found.top_ids.min() <= found.top_ids.max() < VOCAB_SIZE
