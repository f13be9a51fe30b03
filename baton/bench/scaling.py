"""Lengths of somebody else's traffic, made to fit the model that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.bench.lengths import check_length
from baton.core.errors import ConfigError
from baton.core.option_text import positive_number

AUTO_SCALE = "auto"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Scales lengths, then clips them. All limits are in tokens; None sets none.

    Attributes:
        input_scale: factor of prompt lengths.
        output_scale: factor of answer lengths.
        max_input: longest prompt.
        max_output: longest answer.
        context: most that prompt and answer may have together. The prompt gives way: an answer keeps its length, up
            to one token less than the context.
    """

    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    context: int | None = None

    def fit(self, input_tokens: int, output_tokens: int) -> tuple[int, int, bool]:
        """The lengths to ask for, each at least 1, and whether a limit cut one of them."""
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
        """In words, for the report; empty when nothing is changed."""
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
    """
    Args:
        input_scale: a factor, or ``auto``, which :func:`scale_to_longest` settles.

    Raises:
        ConfigError: a factor or a limit that leaves nothing.
    """
    scale = 1.0 if input_scale == AUTO_SCALE else positive_number("--input-scale", input_scale)
    positive_number("--output-scale", str(output_scale))
    if context is not None and context < 2:
        raise ConfigError(f"--context {context} has no room for a prompt and an answer. Give 2 tokens or more.")
    return LengthLimits(scale, output_scale, max_input, max_output, context)


def scale_to_longest(limits: LengthLimits, input_lengths: Sequence[int]) -> LengthLimits:
    """``limits`` with the input factor at which the longest prompt just fits; never over 1.

    Raises:
        ConfigError: nothing says how long a prompt may be.
    """
    room = limits.max_input
    if limits.context is not None:
        room_in_context = limits.context - (limits.max_output or 1)
        room = room_in_context if room is None else min(room, room_in_context)
    if room is None or room < 1:
        raise ConfigError("--input-scale auto must know what fits: give --max-input, or --context and --max-output.")
    return replace(limits, input_scale=min(1.0, room / max(input_lengths)))


def check_room(limits: LengthLimits, mean_input: float, mean_output: float, max_model_len: int | None) -> None:
    """Refuses prompts and answers that the model cannot hold, before anybody writes them.

    Args:
        mean_input, mean_output: tokens before ``limits``.
        max_model_len: tokens of prompt and answer together; None when nobody tells.

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
        f"{what} the context of {max_model_len} tokens that the server tells. Lower it, or have requests cut with "
        f"--context {max_model_len}. Lengths that vary count with their mean."
    )
