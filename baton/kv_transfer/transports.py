"""The payload paths of both ends, in the order in which transfers try them. Register a new path in this file."""

from __future__ import annotations

from baton.kv_transfer.base import KVSink
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.kv_transfer_config import KVTransferConfig
from baton.kv_transfer.payload.base import ReceivePath, SendPath
from baton.kv_transfer.payload.inline import InlineReceivePath, InlineSendPath
from baton.kv_transfer.payload.nixl import NixlReceivePath, NixlSendPath
from baton.kv_transfer.payload.shared_memory import SharedMemoryReceivePath, SharedMemorySendPath
from baton.kv_transfer.payload.sockets import SocketReceivePath, SocketSendPath
from baton.kv_transfer.receiver import KVTransferService
from baton.kv_transfer.sender import GrpcKVTransport
from baton.process.ports import ANY_PORT, PortRange
from baton.rpc.credentials import PeerCredentials


def create_transport(config: KVTransferConfig, credentials: PeerCredentials) -> GrpcKVTransport:
    """Creates the sending end of hand-offs. With certificates, KV between hosts goes only through encrypted messages.

    Raises:
        ConfigError: NIXL is configured, but is not installed or does not start here.
    """
    throttle = Throttle(config.max_bytes_per_second) if config.max_bytes_per_second else None
    return GrpcKVTransport(_send_paths(config, credentials), credentials, throttle, config.transfer_timeout_s)


def create_kv_service(
    config: KVTransferConfig, credentials: PeerCredentials, sink: KVSink, ports: PortRange = ANY_PORT
) -> KVTransferService:
    """Creates the receiving end of hand-offs.

    Args:
        ports: where this worker may listen.

    Raises:
        ConfigError: as for :func:`create_transport`.
    """
    paths = _receive_paths(config, credentials, ports)
    return KVTransferService(sink, paths, longest_wait_s=config.reserve_timeout_s)


def _send_paths(config: KVTransferConfig, credentials: PeerCredentials) -> list[SendPath]:
    paths: list[SendPath] = []
    if config.transport == "nixl":  # receivers on this host may also map its segment
        paths.append(NixlSendPath(config.part_bytes))
    elif config.shared_memory == "auto":
        paths.append(SharedMemorySendPath(config.part_bytes))
    if config.connections and credentials.certificates is None:
        paths.append(SocketSendPath(config.connections))
    return [*paths, InlineSendPath()]


def _receive_paths(config: KVTransferConfig, credentials: PeerCredentials, ports: PortRange) -> list[ReceivePath]:
    paths: list[ReceivePath] = []
    if config.shared_memory == "auto":
        paths.append(SharedMemoryReceivePath())
    if config.transport == "nixl":
        paths.append(NixlReceivePath())
    if config.connections and credentials.certificates is None:
        paths.append(SocketReceivePath(ports))
    return [*paths, InlineReceivePath()]
