"""A grammar in step with one request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.core.errors import BatonError, InternalError, InvalidRequestError

_BITS = 32
_TOO_COMPLEX = (
    "The grammar became too complex for its limits while the answer was made. Make the schema or expression simpler: "
    "smaller numbers of repetitions, fewer alternatives that begin alike."
)


class GrammarState:
    """Implements :class:`baton.core.token_grammar.TokenGrammar`.

    The matcher stands behind the output tokens and then behind the path of a draft. It goes from path to path by way of
    their common beginning, so that a tree of drafts costs about one step per node.

    Args:
        matcher: at the grammar's beginning; only this state uses it.
        vocab_size: columns of the model's logits.
        output: tokens that the request has already.

    Raises:
        InvalidRequestError: the grammar does not allow these tokens, or is too complex.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, output: Sequence[int] = ()) -> None:
        self.error: BatonError | None = None
        self._matcher = matcher
        self._num_words = -(-vocab_size // _BITS)
        self._num_output = 0
        self._path: list[int] = []
        self._forced: list[int] = []
        self._advance(output)
        if isinstance(self.error, InvalidRequestError):
            raise self.error
        if self.error:
            raise InvalidRequestError(f"The grammar does not allow the tokens before this call: {self.error.message}")

    def allowed(self, output: Sequence[int], drafted: Sequence[int] = ()) -> npt.NDArray[np.int32] | None:
        self._advance(output)
        words = np.zeros(self._num_words, dtype=np.int32)
        if self._is_forced(drafted):
            word, bit = divmod(self._forced[len(drafted)], _BITS)
            words.view(np.uint32)[word] = 1 << bit
            return words
        if self._walk(drafted) < len(drafted):
            return None
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():  # its limits of time and memory
                self.error = InvalidRequestError(_TOO_COMPLEX)
                words[:] = 0
            elif not self._path and np.bitwise_count(words).sum() == 1:  # probably the beginning of a forced text
                self._forced = self._matcher.compute_ff_tokens()
        return words

    def num_allowed(self, output: Sequence[int], drafted: Sequence[int]) -> int:
        self._advance(output)
        return self._walk(drafted)

    def forced(self, output: Sequence[int]) -> list[int]:
        self._advance(output)
        if self.error:
            return []
        if not self._forced:
            self._walk(())
            self._forced = self._matcher.compute_ff_tokens()  # all of a long text, which takes as long
        return self._forced

    def _is_forced(self, drafted: Sequence[int]) -> bool:
        """Whether the drafted tokens begin the forced text that is known, and a token of it follows them.

        The library's mask has this token alone, too, but it takes a time in proportion to the length of the whole text.
        """
        num_drafted = len(drafted)
        return not self.error and num_drafted < len(self._forced) and self._forced[:num_drafted] == list(drafted)

    def _advance(self, output: Sequence[int]) -> None:
        """Goes behind the output tokens."""
        if self.error or len(output) == self._num_output:
            return
        self._walk(())
        added = list(output[self._num_output :])
        self._forced = self._forced[len(added) :] if self._forced[: len(added)] == added else []
        if self._matcher.try_consume_tokens(added) < len(added):
            is_at_limit = self._matcher.is_error()  # a token that is merely refused is none
            left = InternalError("its tokens left the grammar")
            self.error = InvalidRequestError(_TOO_COMPLEX) if is_at_limit else left
        self._num_output = len(output)

    def _walk(self, drafted: Sequence[int]) -> int:
        """Goes behind the output tokens and as many drafted ones as are allowed; returns how many these are."""
        if self.error:
            return 0
        num_common = 0
        for own, other in zip(self._path, drafted, strict=False):
            if own != other:
                break
            num_common += 1
        if num_back := len(self._path) - num_common:
            self._matcher.rollback(num_back)
            del self._path[num_common:]
        wanted = list(drafted[num_common:])
        if wanted:
            self._path += wanted[: self._matcher.try_consume_tokens(wanted)]
        return len(self._path)
