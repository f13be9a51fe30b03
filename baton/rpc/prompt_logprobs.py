"""Log probabilities of a prompt in messages of bounded size, and their checks at the other end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from baton.core.errors import InternalError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.rpc.wire import worker_pb2

MAX_PART_BYTES = 2**18
_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")


def pack_prompt_logprobs(found: PromptLogprobs | None) -> Iterator[worker_pb2.PromptLogprobs]:
    """Yields the messages for those of a whole prompt; none without any."""
    if found is None:
        return
    count = MAX_PART_BYTES // (8 * (1 + found.num_top))
    for start in range(0, len(found), count):
        part = found.between(start, start + count)
        yield worker_pb2.PromptLogprobs(
            start=start,
            logprobs=part.logprobs.astype(_FLOAT32).tobytes(),
            ranks=part.ranks.astype(_INT32).tobytes(),
            top_ids=part.top_ids.astype(_INT32).tobytes(),
            top_logprobs=part.top_logprobs.astype(_FLOAT32).tobytes(),
        )


class PromptLogprobsReader:
    """Puts the messages of one prompt together.

    Args:
        num_top: ``SamplingParams.prompt_logprobs``; ``None`` expects no message.
        vocab_size: upper bound of token ids and ranks.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int | None, vocab_size: int) -> None:
        self._found = None if num_top is None else PromptLogprobs.of_prompt(num_prompt_tokens, num_top)
        self._vocab_size = vocab_size
        self._num_read = 0

    def take(self, message: worker_pb2.PromptLogprobs) -> None:
        """Reads the next message.

        Raises:
            InternalError: it does not fit the prompt, or a number in it is impossible.
        """
        found = self._found
        if found is None:
            raise InternalError("A worker sent log probabilities of a prompt that did not ask for any.")
        count = len(message.logprobs) // _FLOAT32.itemsize
        if message.start != self._num_read or not 0 < count <= len(found) - self._num_read:
            raise InternalError(
                f"A worker sent log probabilities for tokens {message.start} to {message.start + count} of a prompt; "
                f"{self._num_read} of {len(found)} were there."
            )
        shape = (count, found.num_top)
        part = PromptLogprobs(
            _logprobs(message.logprobs, (count,)),
            _integers(message.ranks, (count,), 1, self._vocab_size + 1),
            _integers(message.top_ids, shape, 0, self._vocab_size),
            _logprobs(message.top_logprobs, shape),
        )
        found.put(message.start, part)
        self._num_read += count

    def finish(self) -> PromptLogprobs | None:
        """Those of the whole prompt; ``None`` if none were asked for.

        Raises:
            InternalError: some are missing.
        """
        if self._found is not None and self._num_read < len(self._found):
            raise InternalError(
                f"A worker sent log probabilities for {self._num_read} of {len(self._found)} tokens of a prompt."
            )
        return self._found


def _numbers(data: bytes, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    expected = int(np.prod(shape)) * dtype.itemsize
    if len(data) != expected:
        raise InternalError(f"A worker sent {len(data)} bytes of log probabilities of a prompt, expected {expected}.")
    return np.frombuffer(data, dtype).reshape(shape)


def _logprobs(data: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = _numbers(data, shape, _FLOAT32).astype(np.float32)
    if not (values <= _LARGEST).all():  # also false for NaN
        raise InternalError("A worker sent log probabilities of a prompt that are above 0 or not numbers.")
    return values


_LARGEST = np.float32(1e-3)
"""Rounding may lift a probability of almost 1 above it."""


def _integers(data: bytes, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int32]:
    values = _numbers(data, shape, _INT32).astype(np.int32)
    if ((values < low) | (values >= high)).any():
        raise InternalError(
            f"A worker sent token ids or ranks of a prompt's log probabilities outside of {low} to {high - 1}."
        )
    return values
