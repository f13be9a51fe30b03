"""A request's id, from the client to the workers and back.

chatcmpl-1f…     the HTTP request, ``X-Request-Id``
3c…:chatcmpl-1f… the same in the cluster, if it came with an API key: two keys may choose the same id
chatcmpl-1f…-2   one of its sequences, where it has several
…-2/9c…          one attempt of the router: request and transfer id on the workers
…-2/9c…#7        one call of a worker's engine
"""

from __future__ import annotations

import re
import uuid

from baton.core.errors import InvalidRequestError

_ATTEMPT = "/"
MAX_ID_CHARS = 256
_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")
_OWNER = ":"
_WARMUP = "warmup-"


def owned_id(owner: str | None, request_id: str) -> str:
    """The id within the cluster of a request of ``owner``, the tag of an API key; ``None`` means that there is none."""
    return request_id if owner is None else f"{owner}{_OWNER}{request_id}"


def public_id(request_id: str) -> str:
    """The id that the client knows."""
    return request_id.rpartition(_OWNER)[2]


def new_warmup_id() -> str:
    """An ``X-Request-Id`` by which :func:`is_warmup` knows a request that only warms a cluster up, or tests it."""
    return f"{_WARMUP}{uuid.uuid4().hex}"


def is_warmup(request_id: str) -> bool:
    """Whether a client has marked a request by :func:`new_warmup_id`; the id may be that of a sequence."""
    return public_id(request_id).startswith(_WARMUP)


def new_call_id(request_id: str) -> str:
    """Returns a unique id for one attempt.

    Leftovers of an earlier attempt, or of an earlier request with the same client-chosen id, may still be in flight.
    """
    return f"{request_id}{_ATTEMPT}{uuid.uuid4().hex[:12]}"


def request_id_of_call(call_id: str) -> str:
    """The request's id in the router and its logs; ``call_id`` itself when no router made it."""
    return call_id.partition(_ATTEMPT)[0]


def check_id(value: str, name: str) -> None:
    """Raises :class:`InvalidRequestError` unless ``value`` is a short id that can stand in a log line.

    Args:
        name: name of the field, for the message.
    """
    if not _ID.fullmatch(value):
        raise InvalidRequestError(
            f"{name} must have 1 to {MAX_ID_CHARS} visible ASCII characters without spaces, got {len(value)} "
            f"characters: {value[:60]!r}."
        )
