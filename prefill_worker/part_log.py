"""A bounded log of when each part of a hand-off was read, sent and acknowledged."""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.core.timeline import TransferPart

MAX_PARTS = 128


@dataclass(slots=True)
class _Part:
    """One entry. Times are seconds of the monotonic clock; 0 means that the event has not happened yet."""

    num_bytes: int
    started_s: float
    num_parts: int = 1
    sent_s: float = 0.0
    acknowledged_s: float = 0.0
    end: int = 0
    """Bytes of the transfer up to the end of this part."""


class PartLog:
    """Keeps one entry for each of the first parts and merges all later ones into the last entry.

    Args:
        limit: number of entries.
    """

    def __init__(self, limit: int = MAX_PARTS) -> None:
        self._limit = limit
        self._parts: list[_Part] = []
        self._num_acknowledged = 0
        self._num_bytes = 0

    def sending(self, num_bytes: int, started_s: float) -> None:
        """Call when the next part has been read and is passed to the transport."""
        self._num_bytes += num_bytes
        if len(self._parts) < self._limit:
            self._parts.append(_Part(num_bytes, started_s, end=self._num_bytes))
            return
        last = self._parts[-1]
        last.num_bytes += num_bytes
        last.num_parts += 1
        last.end = self._num_bytes
        last.acknowledged_s = 0.0
        self._num_acknowledged = min(self._num_acknowledged, len(self._parts) - 1)

    def sent(self) -> None:
        """Call when the transport has taken the part."""
        self._parts[-1].sent_s = time.monotonic()

    def acknowledged(self, num_bytes: int) -> None:
        """Call when the receiver has written the transfer's first ``num_bytes``."""
        now_s = time.monotonic()
        while self._num_acknowledged < len(self._parts):
            part = self._parts[self._num_acknowledged]
            if part.end > num_bytes:
                return
            part.acknowledged_s = now_s
            self._num_acknowledged += 1

    def parts(self) -> list[TransferPart]:
        """The entries in order. An acknowledgement that was noticed before ``sent`` also counts as the sending time."""
        return [
            TransferPart(
                part.num_bytes,
                part.num_parts,
                part.started_s,
                _earlier(part.sent_s, part.acknowledged_s) or part.started_s,
                part.acknowledged_s,
            )
            for part in self._parts
        ]


def _earlier(sent_s: float, acknowledged_s: float) -> float:
    """When a part was sent, which is at the latest when it was acknowledged. 0 means unknown."""
    return min((at_s for at_s in (sent_s, acknowledged_s) if at_s), default=0.0)
