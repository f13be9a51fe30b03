"""NIXL for KV: its agent, as both ends use it, and the sender's end.

The sender's memory is the segment of ``shared_segment.py``, and parts name their slots as they do on one host. It is
registered with an agent, and its offer says what others need to read it (``nixl_reader.py``): with RDMA where UCX finds
it, else over TCP or memory of one host. All the rest stays with gRPC: room, which parts there are, what has arrived.
"""

from __future__ import annotations

import importlib
import logging
import uuid
from enum import Enum
from typing import Any

import numpy as np

from baton.core.errors import ConfigError
from baton.kv_transfer.payload.shared_segment import SharedSegment
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

_BACKEND = "UCX"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The first takes one of the others, which can be installed without it."""
_PROGRESS_EVERY_US = 100
"""NIXL's own Python class has 0: its thread takes a whole core, also while nothing is read."""


class ReadState(Enum):
    """How a read stands."""

    UNDER_WAY = "is under way"
    DONE = "is done"
    FAILED = "failed"


class NixlAgent:
    """What baton uses of NIXL, by its bindings. One thread at a time may use it. Methods raise whatever NIXL raises.

    Args:
        serves: others will read memory of this process. Without RDMA that takes a thread that serves them.

    Raises:
        ConfigError: NIXL is not installed, or does not start here.
    """

    def __init__(self, *, serves: bool) -> None:
        self._nixl = _import_nixl()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _PROGRESS_EVERY_US
        try:
            self._agent = self._nixl.nixlAgent(f"baton-{uuid.uuid4().hex}", config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        except Exception as error:  # of no common class
            raise ConfigError(
                f"kv_transfer.transport is nixl, but NIXL does not start on this node, with {_BACKEND}: {error}."
            ) from error

    def register(self, memory: memoryview) -> Any:
        """Lets this agent read into memory, and others read from it, until :meth:`deregister` gets the result."""
        region = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address_of(memory), len(memory), 0, "")])
        self._agent.registerMem(region, self._backends)
        return region

    def deregister(self, region: Any) -> None:
        self._agent.deregisterMem(region, self._backends)

    def description(self) -> bytes:
        """What another agent needs to read registered memory."""
        return bytes(self._agent.getLocalMD())

    def meet(self, description: bytes) -> str:
        """The name of the agent that is described, to which nothing is sent yet."""
        name = self._agent.loadRemoteMD(description)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Ends what connects the two."""
        self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, source: int, target: int, num_bytes: int) -> int:
        """From an address of another agent's memory to one of this process, both registered; a handle."""
        there, here = (
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0)]) for address in (source, target)
        )
        handle = int(self._agent.createXferReq(self._nixl.NIXL_READ, here, there, name, "", self._backends))
        try:
            self._agent.postXferReq(handle)
        except BaseException:
            self.release(handle)
            raise
        return handle

    def state(self, handle: int) -> ReadState:
        """How a read stands; asking is what drives it."""
        status = self._agent.getXferStatus(handle)
        if status == self._nixl.NIXL_SUCCESS:
            return ReadState.DONE
        return ReadState.UNDER_WAY if status == self._nixl.NIXL_IN_PROG else ReadState.FAILED

    def release(self, handle: int) -> None:
        """Ends a read. One that is under way may write to its target all the same."""
        self._agent.releaseXferReq(handle)


def address_of(memory: memoryview) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


class NixlExport:
    """Lets others read a sender's segment.

    Raises:
        ConfigError: see :class:`NixlAgent`.
    """

    def __init__(self) -> None:
        self._agent = NixlAgent(serves=True)
        self._region: Any = None

    def add_to(self, segment: SharedSegment) -> None:
        """Its offer says from then on how it can be read.

        Raises:
            OSError: the memory cannot be registered, such as for a limit on locked memory.
        """
        try:
            self._region = self._agent.register(segment.memory)
            description = self._agent.description()
        except Exception as error:
            raise OSError(f"NIXL cannot register {len(segment.memory)} bytes: {error}") from error
        address = address_of(segment.memory)
        slots_address = address + segment.layout.slot_start(0)
        segment.nixl = kv_pb2.KVNixl(agent=description, address=address, slots_address=slots_address)

    def close(self) -> None:
        """Nobody can read it any more."""
        region, self._region = self._region, None
        if region is not None:
            try:
                self._agent.deregister(region)
            except Exception as error:  # noqa: BLE001 - as above; the process ends soon
                logger.warning("NIXL does not let go of memory: %s", error)


def _import_nixl() -> Any:
    reasons = []
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "kv_transfer.transport is nixl, but NIXL is not installed on this node. Install it with "
        f"`pip install 'baton-serve[nixl]'`, or set kv_transfer.transport to grpc. ({reasons[0]})"
    )
