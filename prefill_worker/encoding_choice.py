"""The encoding of hand-offs: as configured or, for ``auto``, int8 where the link is slower than prefill.

If KV is sent as fast as prefill produces it, prefill hides the transfer. Both speeds are measured in bytes per second:
that of steps that compute prompts, and that of acknowledgements while more bytes are waiting to be sent. The latter
includes everything that may be slow (link, cap, receiver), but not the latency of a single part.
"""

from __future__ import annotations

from baton.core.kv_spec import KVEncoding
from baton.kv_transfer.base import Reservation

AUTO = "auto"
BACK_TO_NATIVE = 1.25
"""How much faster than prefill a link must be before its hand-offs are native again."""
_WINDOW_S = 1.0
_MIN_S = 0.05
_MAX_LINKS = 256


class Speed:
    """The bytes per second of about the last second of activity; idle time does not count.

    Attributes:
        bytes_per_second: ``None`` until 0.05 s have been measured.
    """

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self._num_bytes = 0.0
        self._seconds = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Adds a measurement: ``num_bytes`` took ``seconds``."""
        if self._seconds > _WINDOW_S:
            self._num_bytes /= 2
            self._seconds /= 2
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._seconds >= _MIN_S:
            self.bytes_per_second = self._num_bytes / self._seconds


class Link:
    """The link to one receiver, with all transfers on it together.

    Attributes:
        speed: bytes per second that arrive while more is waiting to be sent.
        is_slow: whether int8 was chosen for the last hand-off.
    """

    def __init__(self) -> None:
        self.speed = Speed()
        self.is_slow = False
        self._num_waiting = 0
        self._since_s: float | None = None

    def waits(self, num_bytes: int) -> None:
        """Adds bytes that are ready to be sent."""
        self._num_waiting += num_bytes

    def arrived(self, num_bytes: int, now_s: float) -> None:
        """Takes off bytes that have been acknowledged."""
        if self._since_s is not None:
            self.speed.observe(num_bytes, now_s - self._since_s)
        self._num_waiting -= num_bytes
        self._since_s = now_s if self._num_waiting > 0 else None

    def dropped(self, num_bytes: int) -> None:
        """Takes off bytes that will never arrive."""
        if num_bytes:
            self._num_waiting -= num_bytes
            self._since_s = None


class Passage:
    """Measures one transfer on a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._num_sent = self._num_arrived = 0

    def sending(self, num_bytes: int) -> None:
        """Call when a part is given to the transport."""
        self._num_sent += num_bytes
        self._link.waits(num_bytes)

    def acknowledged(self, num_bytes: int, now_s: float) -> None:
        """Call when the receiver has written the transfer's first ``num_bytes``."""
        self._link.arrived(num_bytes - self._num_arrived, now_s)
        self._num_arrived = num_bytes

    def close(self) -> None:
        """Ends the transfer, whether it succeeded or not."""
        self._link.dropped(self._num_sent - self._num_arrived)
        self._num_sent = self._num_arrived


class EncodingChoice:
    """Chooses the encoding of each hand-off.

    Args:
        setting: ``native``, ``int8`` or ``auto``.

    Attributes:
        prefill: the speed at which prefill makes KV, in native bytes. Another thread may add measurements.
    """

    def __init__(self, setting: str = KVEncoding.NATIVE) -> None:
        self._setting = setting
        self.prefill = Speed()
        self._links: dict[str, Link] = {}

    def offers(self, peer: str) -> tuple[KVEncoding, ...]:
        """Encodings to offer for the next hand-off to ``peer``; empty for native KV only."""
        if self._setting == AUTO:
            return (KVEncoding.INT8,) if self._is_slow(self.link(peer)) else ()
        return (KVEncoding.INT8,) if self._setting == KVEncoding.INT8 else ()

    def encoding(self, reservation: Reservation) -> KVEncoding:
        """The encoding of a hand-off that the receiver has accepted. With ``auto``, shared memory is never too slow."""
        if self._setting == AUTO and reservation.shares_memory:
            return KVEncoding.NATIVE
        return reservation.encoding

    def link(self, peer: str) -> Link:
        """The link to ``peer``. Beyond 256 links, the least recently used one is forgotten."""
        link = self._links.pop(peer, None) or Link()
        self._links[peer] = link
        if len(self._links) > _MAX_LINKS:
            del self._links[next(iter(self._links))]
        return link

    def passage(self, peer: str, reservation: Reservation) -> Passage:
        """Begins to measure a hand-off. A hand-off through shared memory does not count for the link."""
        return Passage(Link() if reservation.shares_memory else self.link(peer))

    def _is_slow(self, link: Link) -> bool:
        made, sent = self.prefill.bytes_per_second, link.speed.bytes_per_second
        if made is None or sent is None:
            return False
        link.is_slow = sent < made * (BACK_TO_NATIVE if link.is_slow else 1)
        return link.is_slow
