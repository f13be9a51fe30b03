"""The ids of the requests that are being served."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.core.request_ids import owned_id


class ActiveIds:
    """Ids of the requests in flight and of their sequences. A request whose id is in use gets a new one.

    Args:
        is_kept: whether an id belongs to an earlier request that can still be looked up.
    """

    def __init__(self, is_kept: Callable[[str], bool] = lambda _: False) -> None:
        self._active: set[str] = set()
        self._is_kept = is_kept

    @contextmanager
    def claim(self, wanted: str, num_sequences: int, owner: str | None = None) -> Iterator[tuple[str, list[str]]]:
        """Reserves the ids of a request and of its sequences. A single sequence has the request's id, several have
        ``<id>-<index>``.

        Args:
            owner: tag of the API key; the ids of one owner are independent of those of others.

        Returns:
            The id for the client, and those of the sequences within the cluster.
        """
        request_id = wanted
        while any(map(self._is_taken, names := _names(owned_id(owner, request_id), num_sequences))):
            request_id = f"{wanted[:51]}-{uuid.uuid4().hex[:12]}"
        self._active |= names
        try:
            yield request_id, _sequence_ids(owned_id(owner, request_id), num_sequences)
        finally:
            self._active -= names

    def _is_taken(self, name: str) -> bool:
        return name in self._active or self._is_kept(name)


def _names(request_id: str, num_sequences: int) -> set[str]:
    return {request_id, *_sequence_ids(request_id, num_sequences)}


def _sequence_ids(request_id: str, num_sequences: int) -> list[str]:
    if num_sequences == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_sequences)]
