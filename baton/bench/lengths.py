"""Token lengths of prompts and answers: distributions, scaling and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from baton.core.errors import ConfigError
from baton.core.option_text import key_values, known_name, positive_integer, positive_number

_Z95 = NormalDist().inv_cdf(0.95)
MAX_LENGTH = 10_000_000
"""Largest length in tokens, beyond any model's context."""
_MAX_SIGMA = 10.0


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Draws lengths in tokens, from 1 to :data:`MAX_LENGTH`.

    Attributes:
        draw: draws one length, not yet rounded.
        mean: mean length in tokens.
        description: text for the report.
    """

    draw: Callable[[np.random.Generator], float]
    mean: float
    description: str

    def sample(self, rng: np.random.Generator) -> int:
        return max(1, round(min(self.draw(rng), MAX_LENGTH)))


def fixed(tokens: int) -> LengthDistribution:
    return LengthDistribution(lambda rng: tokens, tokens, f"always {tokens}")


def uniform(low: int, high: int) -> LengthDistribution:
    """Uniform integers from ``low`` to ``high``, both included."""
    return LengthDistribution(
        lambda rng: int(rng.integers(low, high, endpoint=True)), (low + high) / 2, f"uniform {low}-{high}"
    )


def lognormal(mu: float, sigma: float) -> LengthDistribution:
    """``exp(N(mu, sigma))``, which is close to lengths of real traffic."""
    mean = math.exp(min(mu + sigma**2 / 2, math.log(MAX_LENGTH)))
    description = f"lognormal, median {math.exp(mu):.0f}, p95 {math.exp(mu + _Z95 * sigma):.0f}"
    return LengthDistribution(lambda rng: float(rng.lognormal(mu, sigma)), mean, description)


def parse_lengths(option: str, text: str) -> LengthDistribution:
    """Parses a distribution of lengths:

    ``512``, ``fixed:512``, ``uniform:100-400``, ``lognormal:median=200,p95=800`` or ``lognormal:mean=300,sigma=0.9``.

    Raises:
        ConfigError: it is none of these, or a length is over :data:`MAX_LENGTH`. The text names ``option``.
    """
    kind, separator, values = text.strip().partition(":")
    if not separator:
        kind, values = "fixed", kind
    return _PARSERS[known_name(option, kind, _PARSERS)](option, values)


def _parse_fixed(option: str, values: str) -> LengthDistribution:
    return fixed(_length(option, values))


def _parse_uniform(option: str, values: str) -> LengthDistribution:
    low, separator, high = values.partition("-")
    if not separator:
        raise ConfigError(f"{option}: uniform expects LOW-HIGH, such as uniform:100-400; got {values!r}.")
    ends = _length(option, low), _length(option, high)
    if ends[0] > ends[1]:
        raise ConfigError(f"{option}: the lower end of uniform:{values} exceeds the upper end. Swap them.")
    return uniform(*ends)


def _parse_lognormal(option: str, values: str) -> LengthDistribution:
    given = key_values(option, values, ("median", "p95", "mean", "sigma"))
    numbers = {key: positive_number(f"{option} {key}", value) for key, value in given.items()}
    if (sigma := numbers.get("sigma", 0.0)) > _MAX_SIGMA:
        raise ConfigError(
            f"{option} sigma: {sigma:g} exceeds {_MAX_SIGMA:g}. Sigma is the standard deviation of the "
            "logarithm; lower it."
        )
    for key in numbers.keys() - {"sigma"}:
        check_length(f"{option} {key}", numbers[key])
    if numbers.keys() == {"median", "p95"}:
        median, p95 = numbers["median"], numbers["p95"]
        if p95 <= median:
            raise ConfigError(f"{option}: lognormal: p95 ({p95:g}) must be above the median ({median:g}).")
        return lognormal(math.log(median), math.log(p95 / median) / _Z95)
    if numbers.keys() == {"mean", "sigma"}:
        return lognormal(math.log(numbers["mean"]) - sigma**2 / 2, sigma)
    raise ConfigError(f"{option}: lognormal expects either median and p95 or mean and sigma; got {values!r}.")


def check_length(option: str, tokens: float) -> None:
    """Raises :class:`ConfigError` if ``tokens`` is over :data:`MAX_LENGTH`."""
    if tokens > MAX_LENGTH:
        raise ConfigError(f"{option}: {tokens:.0f} tokens are more than {MAX_LENGTH}, which is too long. Lower it.")


def _length(option: str, text: str) -> int:
    tokens = positive_integer(option, text)
    check_length(option, tokens)
    return tokens


_PARSERS: Mapping[str, Callable[[str, str], LengthDistribution]] = {
    "fixed": _parse_fixed,
    "uniform": _parse_uniform,
    "lognormal": _parse_lognormal,
}


AUTO_SCALE = "auto"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Scales lengths, then clips them. All limits are in tokens; ``None`` means no limit.

    Attributes:
        input_scale: factor of prompt lengths.
        output_scale: factor of answer lengths.
        max_input: longest prompt.
        max_output: longest answer.
        context: limit of prompt and answer together. The prompt is shortened first: an answer keeps its length, up to
            one token less than the context.
    """

    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    context: int | None = None

    def fit(self, input_tokens: int, output_tokens: int) -> tuple[int, int, bool]:
        """Returns the two lengths to request, each at least 1, and whether a limit cut one of them."""
        wanted_input = max(1, round(input_tokens * self.input_scale))
        wanted_output = max(1, round(output_tokens * self.output_scale))
        fitted_output = min(wanted_output, self.max_output or wanted_output)
        if self.context is not None:
            fitted_output = min(fitted_output, self.context - 1)
        fitted_input = min(wanted_input, self.max_input or wanted_input)
        if self.context is not None:
            fitted_input = min(fitted_input, self.context - fitted_output)
        return fitted_input, fitted_output, (fitted_input, fitted_output) != (wanted_input, wanted_output)

    def describe(self) -> str:
        """A description for the report; empty without scaling and limits."""
        parts = [
            f"prompts x {self.input_scale:.4g}" if self.input_scale != 1 else "",
            f"answers x {self.output_scale:.4g}" if self.output_scale != 1 else "",
            f"prompts up to {self.max_input}" if self.max_input else "",
            f"answers up to {self.max_output}" if self.max_output else "",
            f"both together up to {self.context}" if self.context else "",
        ]
        return ", ".join(filter(None, parts))


def make_limits(
    input_scale: str, output_scale: float, max_input: int | None, max_output: int | None, context: int | None
) -> LengthLimits:
    """Creates limits from options.

    Args:
        input_scale: a factor, or ``auto``, which :func:`scale_to_longest` resolves.

    Raises:
        ConfigError: a factor is not positive, or a limit leaves no tokens.
    """
    scale = 1.0 if input_scale == AUTO_SCALE else positive_number("--input-scale", input_scale)
    positive_number("--output-scale", str(output_scale))
    if context is not None and context < 2:
        raise ConfigError(f"--context must be at least 2 tokens, for a prompt and an answer; got {context}.")
    return LengthLimits(scale, output_scale, max_input, max_output, context)


def scale_to_longest(limits: LengthLimits, input_lengths: Sequence[int]) -> LengthLimits:
    """``limits`` with the input factor at which the longest prompt just fits, at most 1.

    Raises:
        ConfigError: no option limits the length of prompts.
    """
    room = limits.max_input
    if limits.context is not None:
        room_in_context = limits.context - (limits.max_output or 1)
        room = room_in_context if room is None else min(room, room_in_context)
    if room is None or room < 1:
        raise ConfigError("--input-scale auto needs a limit: give --max-input, or --context and --max-output.")
    return replace(limits, input_scale=min(1.0, room / max(input_lengths)))


def check_room(limits: LengthLimits, mean_input: float, mean_output: float, max_model_len: int | None) -> None:
    """Refuses prompts and answers beyond the model's context before prompts are written.

    Args:
        mean_input, mean_output: tokens before ``limits``.
        max_model_len: limit of prompt and answer tokens together; ``None`` if unknown.

    Raises:
        ConfigError: a request of these lengths does not fit.
    """
    prompt, answer, _ = limits.fit(round(mean_input), round(mean_output))
    check_length("--input with --input-scale", prompt)
    check_length("--output with --output-scale", answer)
    if max_model_len is None or prompt + answer <= max_model_len:
        return
    if prompt >= max_model_len:
        what = f"--input: a prompt of {prompt} tokens does not fit"
    elif answer >= max_model_len:
        what = f"--output: an answer of {answer} tokens does not fit"
    else:
        what = f"--input and --output: a prompt of {prompt} tokens and an answer of {answer} do not fit"
    raise ConfigError(
        f"{what} into the context of {max_model_len} tokens that the server reports. Lower it, or "
        "shorten requests with "
        f"--context {max_model_len}. Random lengths count with their mean."
    )
