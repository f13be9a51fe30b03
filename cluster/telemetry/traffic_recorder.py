"""Records the shape of the traffic for ``baton trace export``: times, lengths and shared prefixes, without text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from baton.core.block_hashes import HASH_BYTES, hash_blocks
from cluster.requests.request_observers import RequestObserver
from cluster.requests.request_record import RequestRecord

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


class RecordedRequest(NamedTuple):
    """A sequence that got tokens.

    Attributes:
        at_s: its arrival, in seconds since 1970.
        hashes: keyed hashes of its blocks of 512 prompt tokens, each chained to the one before; 16 bytes each.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hashes: bytes


class TrafficRecorder(RequestObserver):
    """Keeps the newest sequences. Hashing takes about 10 µs for each 512 tokens of a prompt, when its sequence ends.

    Args:
        capacity: number of sequences.
        hash_key: secret of the cluster, so that hashes reveal nothing and are the same in all routers.
        clock: monotonic seconds, as in the timelines.
        calendar: seconds since 1970, which clocks of several machines share.
    """

    def __init__(
        self,
        capacity: int,
        hash_key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self._calendar = calendar
        self._kept: deque[RecordedRequest] = deque(maxlen=capacity)
        self._hash_key = hash_key
        self._clock = clock

    def ended(self, record: RequestRecord) -> None:
        """Keeps a sequence that got tokens; others have no length that a trace could use."""
        if not record.token_ids:
            return
        prompt = record.request.prompt_token_ids
        whole, rest = divmod(len(prompt), BLOCK_TOKENS)
        salt, key = record.request.cache_salt, self._hash_key
        hashes = hash_blocks(prompt, BLOCK_TOKENS, whole, salt=salt, key=key)
        if rest:
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(prompt[-rest:], rest, 1, parent, salt=salt, key=key)
        at_s = self._calendar() - (self._clock() - record.received_s)
        self._kept.append(RecordedRequest(at_s, len(prompt), len(record.token_ids), b"".join(hashes)))

    def recorded(self) -> list[RecordedRequest]:
        """The kept sequences in the order in which they ended."""
        return list(self._kept)


def mooncake_requests(recorded: Iterable[RecordedRequest]) -> list[dict[str, Any]]:
    """The lines of a trace in Mooncake's format, in order of arrival. Ids count blocks from 0, in order of appearance.

    Args:
        recorded: of all routers.
    """
    ids: dict[bytes, int] = {}
    ordered = sorted(recorded, key=lambda request: request.at_s)
    return [
        {
            "timestamp": round((request.at_s - ordered[0].at_s) * 1e3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in _blocks(request.hashes)],
        }
        for request in ordered
    ]


def _blocks(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
