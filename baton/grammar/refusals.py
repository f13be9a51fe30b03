"""How a grammar is refused."""

from __future__ import annotations

from baton.core.errors import InvalidRequestError

_REFUSED = "The grammar cannot be honoured: "


def refusal(reason: str, *, param: str | None = None) -> InvalidRequestError:
    """The error for a grammar that cannot be honoured.

    Args:
        reason: in words that follow a colon, with a final period.
    """
    return InvalidRequestError(f"{_REFUSED}{reason}", param=param)


def reason_of(error: InvalidRequestError) -> str:
    """The reason that :func:`refusal` was given, or the whole message of another error."""
    return error.message.removeprefix(_REFUSED)
