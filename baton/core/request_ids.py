"""A request's id on its way: what a client knows, what workers are given, and back.

chatcmpl-1f…     the HTTP request, ``X-Request-Id``
chatcmpl-1f…-2   one of its sequences, where it has several
…-2/9c…          one attempt of the router at it: request and transfer id on the workers
…-2/9c…#7        one call of a worker's engine
"""

from __future__ import annotations

import uuid

_ATTEMPT = "/"


def new_call_id(request_id: str) -> str:
    """A name for one attempt, never the same twice.

    Leftovers of an earlier attempt, or of an earlier request whose client chose the same id, may still be on their way.
    """
    return f"{request_id}{_ATTEMPT}{uuid.uuid4().hex[:12]}"


def request_id_of_call(call_id: str) -> str:
    """What the router and its logs call the request; ``call_id`` itself when no router made it."""
    return call_id.partition(_ATTEMPT)[0]
