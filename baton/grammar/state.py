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
    "smaller numbers of repetitions, fewer alternatives that begin alike, no part that always leads back to itself."
)


class GrammarState:
    """Implements :class:`baton.core.token_grammar.TokenGrammar`.

    One matcher stands behind the output tokens and never goes back. A copy of it goes along the paths of a draft, back
    to the output's end and along the next path. It is copied anew where llguidance 1.9.1 goes back wrongly: it counts
    the bytes of tokens that a grammar names by id as those of their text, and it keeps one mask, which it may return
    for another text of as many parts. A mask computed at the output's end takes its place, but not within a text that
    is forced.

    Args:
        matcher: at the grammar's beginning; only this state uses it.
        vocab_size: columns of the model's logits.
        output: tokens that the request has already.
        has_ids: the grammar names tokens by id.

    Raises:
        InvalidRequestError: the grammar does not allow these tokens, or is too complex.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, output: Sequence[int], *, has_ids: bool) -> None:
        self._error: BatonError | None = None
        self._error_of_draft: BatonError | None = None
        self._matcher = matcher
        self._num_words = -(-vocab_size // _BITS)
        self._num_output = 0
        self._forced: list[int] = []
        self._branch, self._path = matcher, list[int]()
        self._has_ids = has_ids
        self._masks: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
        self._advance(output)
        if isinstance(self._error, InvalidRequestError):
            raise self._error
        if self._error:
            raise InvalidRequestError(f"The grammar does not allow the tokens before this call: {self._error.message}")

    @property
    def error(self) -> BatonError | None:
        return self._error or self._error_of_draft

    def allowed(self, output: Sequence[int], drafted: Sequence[int] = ()) -> npt.NDArray[np.int32] | None:
        self._advance(output)
        path = tuple(drafted)
        if path not in self._masks:  # a draft's paths are asked for by the method that makes it and by the verifier
            if self._is_forced(path):
                self._masks[path] = self._only(self._forced[len(path)])
            elif self._walk(path) < len(path):
                return None
            else:
                self._masks[path] = self._computed(self._branch if path else self._matcher)
        return self._masks[path]

    def num_allowed(self, output: Sequence[int], drafted: Sequence[int]) -> int:
        self._advance(output)
        return self._walk(drafted)

    def forced(self, output: Sequence[int]) -> list[int]:
        self._advance(output)
        if self._error:
            return []
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()  # all of a long text, which takes as long
        return self._forced

    def _is_forced(self, path: tuple[int, ...]) -> bool:
        """Whether the drafted tokens begin the forced text that is known, and a token of it follows them.

        The library's mask has this token alone, too, but it takes a time in proportion to the length of the whole text.
        """
        return not self._error and len(path) < len(self._forced) and tuple(self._forced[: len(path)]) == path

    def _only(self, token: int) -> npt.NDArray[np.int32]:
        """The mask that allows one token."""
        words = np.zeros(self._num_words, dtype=np.int32)
        words.view(np.uint32)[token // _BITS] = 1 << token % _BITS
        return words

    def _computed(self, matcher: LLMatcher) -> npt.NDArray[np.int32]:
        words = np.zeros(self._num_words, dtype=np.int32)
        if self._error:
            return words
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        is_draft = matcher is not self._matcher
        if matcher.is_error():  # its limits of time and memory
            words[:] = 0
            if is_draft:  # perhaps the request takes another path
                self._error_of_draft = InvalidRequestError(_TOO_COMPLEX)
            else:
                self._error = InvalidRequestError(_TOO_COMPLEX)
        elif not is_draft and np.bitwise_count(words).sum() == 1:  # probably of a forced text
            self._forced = matcher.compute_ff_tokens()
        return words

    def _advance(self, output: Sequence[int]) -> None:
        """Goes behind the output tokens."""
        if self._error or len(output) == self._num_output:
            return
        added = list(output[self._num_output :])
        self._num_output = len(output)
        has_branch = self._branch is not self._matcher and self._go_back()
        self._forced = self._forced[len(added) :] if self._forced[: len(added)] == added else []
        self._masks, self._error_of_draft = {}, None
        if self._matcher.try_consume_tokens(added) < len(added):
            is_at_limit = self._matcher.is_error()  # a token that is merely refused is none
            left = InternalError("its tokens left the grammar")
            self._error = InvalidRequestError(_TOO_COMPLEX) if is_at_limit else left
        if not has_branch or self._branch.try_consume_tokens(added) < len(added):
            self._branch = self._matcher
        self._path = []

    def _walk(self, drafted: Sequence[int]) -> int:
        """Takes the branch behind as many of the drafted tokens as are allowed; returns how many these are."""
        if self._error:
            return 0
        num_walked = len(self._path)
        if self._path != list(drafted[:num_walked]):
            if not self._go_back():
                self._branch = self._matcher
            self._path, num_walked = [], 0
        if wanted := list(drafted[num_walked:]):
            if self._branch is self._matcher:
                self._branch = self._matcher.deep_copy()
            self._path += wanted[: self._branch.try_consume_tokens(wanted)]
        return len(self._path)

    def _go_back(self) -> bool:
        """Takes the branch to the output's end, unless it must be copied anew."""
        if not self._path:
            return True
        if self._has_ids or self._branch.is_stopped() or self._forced or self._matcher.compute_ff_bytes():
            return False
        self._branch.rollback(len(self._path))
        words = np.empty(self._num_words, dtype=np.int32)
        self._branch.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._branch.is_error()
