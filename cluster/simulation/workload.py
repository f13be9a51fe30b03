"""Converts the requests of a trace to arrivals, with times, lengths, classes and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from baton.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, lay_blocks
from baton.core.errors import ConfigError
from baton.core.request import SamplingParams
from cluster.simulation.schedule import Schedule

_FIRST_TOKEN = 1024
_TOKENS = 16_384
"""Number of different ids in prompts, small enough for any vocabulary."""
_TABLE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to replay.

    Attributes:
        at_s: seconds since the start of the replay.
        slo: name of its class.
        is_cut: its prompt was too long for the model and was shortened.
    """

    at_s: float
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    slo: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """A request of a real run.

    Attributes:
        cached_tokens: prompt tokens in the real worker's prefix cache.
        is_warmup: the report of the real run leaves it out.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    is_warmup: bool


class PromptTokens:
    """Makes prompts that share prefixes exactly where the trace says so."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self._table = [_FIRST_TOKEN + random.randrange(_TOKENS) for _ in range(_TABLE_TOKENS)]

    def make(self, request: TraceRequest, number: int, scale: float = 1.0) -> tuple[int, ...]:
        """Makes the prompt of a request.

        Args:
            number: number of the request. Tokens beyond the trace's blocks are unique to it.
            scale: factor by which the request's length was changed; its blocks are scaled alike.
        """
        tokens: list[int] = []
        if request.hash_ids:
            block_tokens = MOONCAKE_BLOCK_TOKENS * scale
            num_hashed = min(request.input_tokens, max(1, round(len(request.hash_ids) * block_tokens)))
            for block, count in lay_blocks(request.hash_ids, block_tokens, num_hashed):
                tokens += self._text(block, count)
        return (*tokens, *self.own(number, request.input_tokens - len(tokens)))

    def own(self, number: int, count: int) -> list[int]:
        """Tokens that share no prefix with other requests."""
        return self._text(-number - 1, count)

    def _text(self, key: int, count: int) -> list[int]:
        """A text of a key. A shorter text is a prefix of a longer one with the same key. The first three tokens encode
        the key, so texts of different keys differ from their start."""
        sign, number = int(key < 0), abs(key)
        tokens = [
            _FIRST_TOKEN + number % _TOKENS,
            _FIRST_TOKEN + number // _TOKENS % _TOKENS,
            _FIRST_TOKEN + 2 * (number // _TOKENS**2) + sign,
        ]
        start = (key * 2_654_435_761) % _TABLE_TOKENS
        while len(tokens) < count:
            tokens += self._table[start : start + count - len(tokens)]
            start = 0
        return tokens[:count]


def make_arrivals(
    trace: Sequence[TraceRequest],
    *,
    rate_scale: Schedule | float = 1.0,
    input_scale: Schedule | float = 1.0,
    output_scale: Schedule | float = 1.0,
    num_requests: int | None = None,
    shares: Mapping[str, float],
    max_tokens: int,
    seed: int = 0,
) -> list[Arrival]:
    """Converts a trace to arrivals.

    Args:
        rate_scale: speed-up of the arrivals, by the replay's clock.
        input_scale, output_scale: factors of the lengths.
        num_requests: number of requests. Beyond its length, the trace is repeated with other prompts.
        shares: relative frequency of requests by class.
        max_tokens: limit of prompt and answer together. Longer prompts are shortened.

    Raises:
        ConfigError: a share is negative, or none is above 0.
    """
    if not shares or min(shares.values()) < 0 or not sum(shares.values()) > 0:
        raise ConfigError(f"The shares of classes must be numbers, at least one of them above 0, got {dict(shares)}.")
    random, prompts = Random(seed), PromptTokens(seed)
    names, weights = list(shares), list(shares.values())
    length_s = trace[-1].at_s * len(trace) / max(1, len(trace) - 1)
    rate, longer_prompt, longer_answer = map(_schedule, (rate_scale, input_scale, output_scale))
    now_s = recorded_s = 0.0
    arrivals = []
    for number in range(len(trace) if num_requests is None else num_requests):
        lap, index = divmod(number, len(trace))
        recorded = _lap(trace[index], lap, length_s)
        now_s += (recorded.at_s - recorded_s) / rate.at(now_s)
        recorded_s = recorded.at_s
        scale = longer_prompt.at(now_s)
        wanted_input = max(1, round(recorded.input_tokens * scale))
        num_output = min(max(1, round(recorded.output_tokens * longer_answer.at(now_s))), max_tokens - 1)
        num_input = min(wanted_input, max_tokens - num_output)
        prompt = prompts.make(replace(recorded, input_tokens=num_input), number, scale)
        params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True, seed=number)
        slo = random.choices(names, weights)[0]
        arrivals.append(Arrival(now_s, prompt, params, slo, is_cut=num_input < wanted_input))
    return arrivals


def repeat_arrivals(measured: Sequence[MeasuredRequest], slo: str, seed: int = 0) -> list[Arrival]:
    """Repeats the requests of a real run. The cached part of each prompt is a prefix that all prompts share."""
    prompts = PromptTokens(seed)
    common = prompts.own(0, max((request.cached_tokens for request in measured), default=0))
    arrivals = []
    for number, request in enumerate(measured, start=1):
        shared = min(request.cached_tokens, request.input_tokens - 1)
        own = prompts.own(number, request.input_tokens - shared)
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True, seed=number)
        arrivals.append(Arrival(request.at_s, (*common[:shared], *own), params, slo))
    return arrivals


def _schedule(factor: Schedule | float) -> Schedule:
    return factor if isinstance(factor, Schedule) else Schedule.constant(factor)


def _lap(request: TraceRequest, lap: int, length_s: float) -> TraceRequest:
    """The request in a repetition of the trace. Prefixes are shared within a repetition, not across."""
    if not lap:
        return request
    shift = lap * 100_000_000
    hash_ids = tuple(block + shift for block in request.hash_ids)
    return TraceRequest(request.at_s + lap * length_s, request.input_tokens, request.output_tokens, hash_ids)
