"""Parameters, status changes, and when a request ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError
from baton.core.request import FinishReason, Request, RequestStatus, SamplingParams, check_token_ids

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", -0.5),
        ("top_p", 1.1),
        ("top_p", math.inf),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", -1),
        ("seed", 2**63),
        ("logit_bias", ((1, 0.0), (2, 100.5))),
        ("logit_bias", ((1, math.nan),)),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", math.inf),
        ("max_tokens", "32"),
        ("max_tokens", None),
        ("temperature", "0"),
        ("temperature", None),
        ("top_k", 1.5),
        ("seed", None),
        ("logprobs", 1.5),
        ("logprobs", True),
        ("ignore_eos", "no"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", [1.5]),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", "ab"),
        ("logit_bias", ((5.5, 1),)),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{param} must be ") as error:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_k", -1),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("min_p", 1.0),
        ("min_tokens", 16),
        ("logprobs", 0),
        ("logprobs", 20),
        ("seed", 2**63 - 1),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("logit_bias", ((1, -100.0), (2, 100.0))),
    ],
)
def test_the_bounds_of_every_range_are_allowed(param: str, value: object) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value  # type: ignore[arg-type]


def test_numbers_of_numpy_are_allowed() -> None:
    changes: dict[str, Any] = {
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "stop_token_ids": [np.int32(7)],
    }
    assert SamplingParams(**changes).max_tokens == 3


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    check_token_ids([0, 9], 10, "prompt")
    check_token_ids([], 10, "prompt")
    with pytest.raises(InvalidRequestError, match=f"prompt has the token id {bad}, .* from 0 to 9"):
        check_token_ids([0, bad, 9], 10, "prompt")
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(bad,)).check_token_ids(10)
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=((bad, 1.0),)).check_token_ids(10)


W, R, P, F = RequestStatus
ALLOWED = {(W, R), (W, F), (R, P), (R, F), (P, R), (P, F)}


@pytest.mark.parametrize("before", list(RequestStatus))
@pytest.mark.parametrize("after", list(RequestStatus))
def test_status_transitions_follow_the_table(before: RequestStatus, after: RequestStatus) -> None:
    request = Request("id", [1], SamplingParams(), status=before)
    if (before, after) in ALLOWED:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(RuntimeError, match=f"illegal status change {before} → {after}"):
            request.move_to(after)
        assert request.status is before


@pytest.mark.parametrize(
    ("params", "tokens", "reasons"),
    [
        ({"max_tokens": 3}, [5, 5, 5], [None, None, LENGTH]),
        ({"max_tokens": 3}, [5, 2], [None, STOP]),
        ({"max_tokens": 1}, [2], [STOP]),
        ({"max_tokens": 3, "ignore_eos": True}, [2, 2, 2], [None, None, LENGTH]),
        ({"max_tokens": 3, "stop_token_ids": (7, 8)}, [5, 8], [None, STOP]),
        ({"max_tokens": 3, "stop_token_ids": (7,), "ignore_eos": True}, [2, 7], [None, STOP]),
        ({"max_tokens": 4, "min_tokens": 2}, [2, 2, 2], [None, None, STOP]),
        ({"max_tokens": 4, "min_tokens": 2, "stop_token_ids": (7,)}, [7, 7, 7], [None, None, STOP]),
        ({"max_tokens": 2, "min_tokens": 2}, [2, 2], [None, LENGTH]),
    ],
)
def test_append_output_reports_the_end_of_a_request(
    params: dict[str, object], tokens: list[int], reasons: list[FinishReason | None]
) -> None:
    request = Request("id", [1], SamplingParams(**params), eos_token_ids=frozenset({2}))  # type: ignore[arg-type]
    assert [request.append_output(token) for token in tokens] == reasons
    assert request.output_token_ids == tokens


def test_a_resumed_request_counts_tokens_the_client_has_seen() -> None:
    request = Request("id", [1], SamplingParams(max_tokens=3), output_token_ids=[5, 5])
    assert request.append_output(5) is LENGTH


@given(
    prompt=st.lists(st.integers(), min_size=1, max_size=8),
    output=st.lists(st.integers(), max_size=8),
    ends=st.tuples(st.integers(0, 16), st.integers(0, 16)),
)
def test_tokens_between_is_a_slice_of_prompt_and_output(
    prompt: list[int], output: list[int], ends: tuple[int, int]
) -> None:
    request = Request("id", prompt, SamplingParams(), output_token_ids=output)
    tokens = prompt + output
    start, end = sorted(min(position, len(tokens)) for position in ends)
    assert request.num_tokens == len(tokens)
    assert request.tokens_between(start, end) == tokens[start:end]
    assert [request.token_at(position) for position in range(len(tokens))] == tokens
