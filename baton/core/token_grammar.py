"""What the engine asks of a grammar that restricts a request's tokens. Implemented in ``baton/grammar/``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.errors import BatonError


class TokenGrammar(Protocol):
    """The state of a grammar behind a request's output tokens. Only the engine's thread uses it."""

    @property
    def error(self) -> BatonError | None:
        """Why no token is allowed behind the output, or behind a path of the last draft; ``None`` if some are."""
        ...

    def allowed(self, output: Sequence[int], drafted: Sequence[int] = ()) -> npt.NDArray[np.int32] | None:
        """The tokens that may follow ``output`` and then ``drafted``, as bits: token ``i`` is bit ``i % 32`` of word
        ``i // 32``.

        Args:
            output: the request's output tokens; they only grow from call to call.
            drafted: the path of a draft behind them.

        Returns:
            ``None`` if the grammar refuses a drafted token, so that the path cannot be reached.
        """
        ...

    def num_allowed(self, output: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of the drafted tokens, from the first on, may follow ``output``."""
        ...

    def forced(self, output: Sequence[int]) -> list[int]:
        """The tokens of the text that must follow ``output``; the model may divide this text into other tokens."""
        ...
