"""Choosing tokens waits for no device: what is done depends on the rows alone, and gives what looking would give."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.logits import SamplingRow, process_logits
from engine.request import SamplingParams
from engine.sampler import queue_sample, sample

VOCAB_SIZE = 300  # more than top-p sorts at first

tokens = st.integers(0, VOCAB_SIZE - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(16),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 290]),
    top_p=st.sampled_from([0.4, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 16]),
    logprobs=st.sampled_from([None, 0, 3]),
)
batches = st.lists(
    st.builds(
        SamplingRow,
        params=params,
        position=st.integers(0, 100),
        prompt_token_ids=st.lists(tokens, max_size=6),
        output_token_ids=st.lists(tokens, max_size=6),
        forbidden=st.frozensets(tokens, max_size=2),
    ),
    min_size=1,
    max_size=5,
)


class NothingFromPageableMemory(TorchFunctionMode):
    """Refuses what takes tables of Python's to the device as they are, for which the host would wait as well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list | np.ndarray) for part in index), "an index that lies in host memory"
        assert func is not torch.tensor, "a tensor of a list"
        return func(*args, **kwargs)


@settings(max_examples=60, deadline=None)
@given(rows=batches)
def test_no_value_on_the_device_decides_what_is_queued(rows: list[SamplingRow]) -> None:
    """Tensors of the meta device have none: whoever asks for one, or for a shape that depends on one, fails."""
    logits = torch.empty(len(rows), VOCAB_SIZE, device="meta")
    with NothingFromPageableMemory():
        queued = queue_sample(logits, rows)
    assert queued.token_ids.shape == (len(rows),)


@settings(max_examples=200, deadline=None)
@given(rows=batches, seed=st.integers(0, 2**32 - 1), has_ties=st.booleans())
def test_the_outcome_is_that_of_the_host(rows: list[SamplingRow], seed: int, has_ties: bool) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    if has_ties:
        logits = logits.round()
    processed, drawn = process_logits(logits, rows), sample(logits, rows)
    with mock.patch("engine.logits.is_on_host", return_value=False):
        assert torch.equal(process_logits(logits, rows), processed)
        with mock.patch("engine.sampler.is_on_host", return_value=False):
            assert [token.token_id for token in sample(logits, rows)] == [token.token_id for token in drawn]
