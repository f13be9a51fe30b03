"""The counter-based noise and the tokens drawn with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import SEED_LIMIT, SamplingParams
from baton.engine.sampling import sampler
from baton.engine.sampling.logits import SamplingRow, process_logits
from baton.engine.sampling.sampler import draw, sample, uniform


def row(position: int, **params: float | int | None) -> SamplingRow:
    parsed = SamplingParams(**params)  # type: ignore[arg-type]
    return SamplingRow(parsed, position, [0], [], parsed.token_edits())


def chi_square_limit(degrees: int) -> float:
    """A value that chi-square exceeds with a probability of about 1e-6 (Wilson and Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@given(seed=st.integers(0, SEED_LIMIT - 1), position=st.integers(0, 10**7), stream=st.integers(0, 5))
def test_uniform_is_a_function_into_the_unit_interval(seed: int, position: int, stream: int) -> None:
    value = uniform(seed, position, stream)
    assert 0 <= value < 1
    assert value == uniform(seed, position, stream)


@pytest.mark.parametrize(
    "draws",
    [
        [uniform(7, position) for position in range(20_000)],
        [uniform(seed, 7) for seed in range(20_000)],
        [uniform(seed << 32, 7) for seed in range(20_000)],
        [uniform(7, position, 1) for position in range(20_000)],
        [uniform(7, 7, stream) for stream in range(20_000)],
    ],
    ids=["positions", "seeds", "high bits of seeds", "positions of another stream", "streams"],
)
def test_uniform_is_flat_and_uncorrelated_along_every_axis(draws: list[float]) -> None:
    values = torch.tensor(draws, dtype=torch.float64)
    num_bins = 64
    counts = torch.histc(values, num_bins, 0, 1)
    assert chi_square(counts, torch.full_like(counts, len(draws) / num_bins)) < chi_square_limit(num_bins - 1)
    for lag in (1, 2, 16):
        correlation = torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(len(draws))


def test_neighbouring_seeds_and_streams_share_no_noise() -> None:
    seen = {uniform(seed, position, stream) for seed in range(40) for position in range(40) for stream in range(3)}
    assert len(seen) == 40 * 40 * 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_frequencies_follow_the_processed_distribution(params: dict[str, float]) -> None:
    num_draws, batch = 24_000, 2_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)) * 1.5
    probs = process_logits(logits, [row(0, **params)]).softmax(-1)[0]
    counts = torch.zeros(12)
    for start in range(0, num_draws, batch):
        drawn = sample(logits.expand(batch, -1), [row(start + index, seed=9, **params) for index in range(batch)])
        counts += torch.bincount(torch.tensor([token.token_id for token in drawn]), minlength=12)
    possible = probs > 0
    assert int(counts[~possible].sum()) == 0
    assert chi_square(counts[possible], probs[possible] * num_draws) < chi_square_limit(int(possible.sum()) - 1)


@pytest.mark.parametrize("noise", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position, stream=0: noise)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(1, 301, generator=generator)
        logits[0, :100] = -math.inf
        logits[0, 250:] = -math.inf
        logits[0, 150] = -2000.0  # underflows to probability 0
        token = sample(logits, [row(1)])[0].token_id
        assert token is not None
        assert 100 <= token < 250
        assert token != 150
        allowed = set(logits[0].topk(3).indices.tolist())
        assert sample(logits, [row(1, top_k=3)])[0].token_id in allowed


def test_noise_beyond_the_last_cumulative_sum_still_gives_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position, stream=0: 1.0)
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    assert sample(logits, [row(1)])[0].token_id == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_no_token_and_do_not_affect_other_rows(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    rows = [row(index, temperature=temperature, top_p=0.9, logprobs=2) for index in range(3)]
    expected = [token.token_id for token in sample(logits, rows)]
    logits[1, 5] = bad
    found = [token.token_id for token in sample(logits, rows)]
    assert found == [expected[0], None, expected[2]]


@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)))
def test_the_choice_does_not_depend_on_the_rest_of_the_batch(seed: int, order: list[int]) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 2
    rows = [
        row(3, seed=seed),
        row(3, seed=seed + 1, temperature=0.6, top_k=4),
        row(9, temperature=0),
        row(9, seed=seed, top_p=0.7),
        row(2, seed=seed, min_p=0.2, repetition_penalty=1.2),
        row(9, seed=seed, logprobs=3),
    ]
    alone = [sample(logits[index : index + 1], [rows[index]])[0] for index in range(6)]
    together = sample(logits[order], [rows[index] for index in order])
    assert together == [alone[index] for index in order]


def test_logprobs_are_those_of_the_unprocessed_model() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    params = {"temperature": 0.3, "top_k": 2, "frequency_penalty": 1.0}
    none, found = sample(logits, [row(1, **params), row(2, **params, logprobs=4)])
    expected = logits[1].double().log_softmax(-1)
    assert none.logprobs is None
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-5)
    assert [token for token, _ in found.logprobs.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in found.logprobs.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)


def test_zero_logprobs_report_only_the_chosen_token() -> None:
    (token,) = sample(torch.tensor([[0.0, 5.0]]), [row(1, temperature=0, logprobs=0)])
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.top == ()


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([1, 255, 256, 257, 700, 1024]),
    share=st.floats(0, 1),
    noise=st.lists(st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)), min_size=1, max_size=8),
)
def test_draws_match_one_long_cumulative_sum(seed: int, vocab_size: int, share: float, noise: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(len(noise), vocab_size, generator=generator, dtype=torch.float64)
    probs[torch.rand(probs.shape, generator=generator) < share] = 0
    probs[:, seed % vocab_size] = 0.5
    found = draw(probs, noise).tolist()
    cumulative = probs.cumsum(dim=-1)
    for row_probs, sums, token, fraction in zip(probs, cumulative, found, noise, strict=True):
        wanted = fraction * float(sums[-1])
        assert float(row_probs[token]) > 0
        assert float(sums[token]) > wanted - 1e-9
        assert float(sums[token] - row_probs[token]) <= wanted + 1e-9


def test_one_bad_logit_affects_only_its_own_row() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    good = sample(logits, [row(4, seed=index) for index in range(3)])
    logits[1, 599] = float("nan")
    assert [token.token_id for token in sample(logits, [row(4, seed=index) for index in range(3)])] == [
        good[0].token_id,
        None,
        good[2].token_id,
    ]
