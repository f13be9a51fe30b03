"""Sampling waits for no device: it decides by the rows alone, with the results of sampling that reads values."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request import SamplingParams
from baton.engine.sampling.logits import SamplingRow, process_logits
from baton.engine.sampling.sampler import QueuedSample, queue_sample, sample
from tests.device_waits import DeviceWaits, Kind

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
        lambda params, stop_ids, **row: SamplingRow(params, edits=params.token_edits(stop_ids), **row),
        params=params,
        position=st.integers(0, 100),
        prompt_token_ids=st.lists(tokens, max_size=6),
        output_token_ids=st.lists(tokens, max_size=6),
        stop_ids=st.frozensets(tokens, max_size=2),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(rows=batches)
def test_no_value_on_the_device_decides_what_is_queued(rows: list[SamplingRow]) -> None:
    """Reading the outcome waits once, and then finds the log probabilities that rows ask for."""
    logits = torch.empty(len(rows), VOCAB_SIZE, device="meta")
    waits = DeviceWaits()
    queued: list[QueuedSample] = []
    waits.watch(lambda: queued.append(queue_sample(logits, rows)))
    assert waits.waits == []
    assert queued[0].token_ids.shape == (len(rows),)
    waits.watch(queued[0].read)
    num_logprobs = sum(1 + bool(count) for row in rows if (count := row.params.logprobs) is not None)
    assert [wait.kind for wait in waits.found] == [Kind.DOWNLOAD] * (1 + num_logprobs)


@settings(max_examples=200, deadline=None)
@given(rows=batches, seed=st.integers(0, 2**32 - 1), has_ties=st.booleans())
def test_the_outcome_matches_sampling_on_the_host(rows: list[SamplingRow], seed: int, has_ties: bool) -> None:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    if has_ties:
        logits = logits.round()
    processed, drawn = process_logits(logits, rows), sample(logits, rows)
    with mock.patch("baton.engine.sampling.logits.is_on_host", return_value=False):
        assert torch.equal(process_logits(logits, rows), processed)
        with mock.patch("baton.engine.sampling.sampler.is_on_host", return_value=False):
            assert [token.token_id for token in sample(logits, rows)] == [token.token_id for token in drawn]
