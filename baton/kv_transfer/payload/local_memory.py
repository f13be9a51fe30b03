"""What a sender's transfers share of its memory with receivers: one segment, from the first offer on."""

from __future__ import annotations

import logging
from collections import deque

from baton.kv_transfer.payload.nixl_agent import NixlExport
from baton.kv_transfer.payload.shared_segment import SEGMENT_BYTES, SharedSegment, Slot
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)


class LocalMemory:
    """The segment of a sender, which exists from its first transfer on.

    Args:
        part_bytes: the largest part that may travel so.
        segment_bytes: for all parts together.
        export: lets receivers elsewhere read it, too; closed with it.
    """

    def __init__(self, part_bytes: int, segment_bytes: int = SEGMENT_BYTES, export: NixlExport | None = None) -> None:
        self._part_bytes = part_bytes
        self._segment_bytes = segment_bytes
        self._segment: SharedSegment | None = None
        self._export = export
        self._over = False

    def segment(self) -> SharedSegment | None:
        """None when there is no such memory; the log says why, once."""
        if self._segment is None and not self._over:
            try:
                self._segment = self._make_segment()
            except OSError as error:
                self._over = True
                logger.warning("no memory can be shared with others on this host, KV goes in messages: %s", error)
        return self._segment

    def close(self) -> None:
        """No transfer may begin any more."""
        self._over = True
        segment, self._segment = self._segment, None
        if self._export is not None:
            self._export.close()
        if segment is not None:
            segment.close()

    def _make_segment(self) -> SharedSegment:
        segment = SharedSegment(self._part_bytes, self._segment_bytes)
        if self._export is not None:
            try:
                self._export.add_to(segment)
            except OSError as error:
                logger.warning("no other host reads this worker's memory, KV goes to them otherwise: %s", error)
        return segment


class SlotsInFlight:
    """The slots of one transfer, each until the receiver has acknowledged what is in it."""

    def __init__(self, segment: SharedSegment | None) -> None:
        self._segment = segment
        self._accepted = False
        self._slots: deque[tuple[int, Slot]] = deque()

    @property
    def offer(self) -> kv_pb2.KVSegment | None:
        """What the receiver is asked to map."""
        return None if self._segment is None else self._segment.offer

    @property
    def is_offered(self) -> bool:
        """Whether there is such memory."""
        return self._segment is not None

    @property
    def accepted(self) -> bool:
        """Whether the receiver has mapped it."""
        return self._accepted

    def accept(self) -> None:
        """The receiver has mapped the segment."""
        self._accepted = self._segment is not None

    def take(self, num_bytes: int) -> Slot | None:
        """A slot for a part; see :meth:`SharedSegment.take`."""
        return self._segment.take(num_bytes) if self._accepted and self._segment is not None else None

    def sending(self, slot: Slot, end: int) -> None:
        """``slot`` holds the transfer's bytes up to ``end``."""
        self._slots.append((end, slot))

    def acknowledged(self, num_bytes: int) -> None:
        """The receiver has written the transfer's first ``num_bytes``."""
        while self._slots and self._slots[0][0] <= num_bytes:
            self._slots.popleft()[1].release()

    def release_all(self) -> None:
        """The transfer is over. A receiver that does not know that yet finds new generations in slots used again."""
        while self._slots:
            self._slots.popleft()[1].release()
