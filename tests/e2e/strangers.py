"""What a stranger, who has no certificate, key or token, gets from the TCP ports of a tree of processes."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import psutil

_PATHS = ("/", "/health", "/ready", "/metrics", "/v1/models", "/v1/requests", "/admin/status", "/api/version", "/nodes")
_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/baton.v1.Worker/Ping",
    "/baton.v1.KVTransfer/Transfer",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.autoscaler.AutoscalerStateService/GetClusterStatus",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ReporterService/GetTraceback",
)
_TIMEOUT_S = 5.0


@dataclass(frozen=True, order=True)
class Port:
    """A listening TCP port and the program that opened it."""

    program: str
    host: str
    number: int


def listening_ports(pid: int) -> list[Port]:
    """The ports at which a process and its descendants listen."""
    root = psutil.Process(pid)
    found: set[Port] = set()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host = "127.0.0.1" if connection.laddr.ip in ("0.0.0.0", "::") else connection.laddr.ip
                    found.add(Port(_program(process), host, connection.laddr.port))
    return sorted(found)


def answers(port: Port) -> Iterator[str]:
    """What the port answers with success, as ``HTTP /path`` or ``gRPC /service/method``."""
    for encrypted in (False, True):
        kind = "HTTPS" if encrypted else "HTTP"
        yield from (f"{kind} {path}" for path in _PATHS if _answers_http(port, path, encrypted=encrypted))
    with grpc.insecure_channel(f"{port.host}:{port.number}") as channel:
        yield from (f"gRPC {method}" for method in _METHODS if _answers_grpc(channel, method))


def _answers_http(port: Port, path: str, *, encrypted: bool) -> bool:
    connection = http.client.HTTPConnection(port.host, port.number, timeout=_TIMEOUT_S)
    try:
        if encrypted:
            connection = http.client.HTTPSConnection(
                port.host, port.number, timeout=_TIMEOUT_S, context=ssl._create_unverified_context()
            )
        connection.request("GET", path)
        return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _answers_grpc(channel: grpc.Channel, method: str) -> bool:
    try:
        channel.unary_unary(method)(b"", timeout=_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return True


def _program(process: psutil.Process) -> str:
    """A name that stays the same from run to run, such as ``raylet``, ``agent.py`` or ``ray::RouterActor``."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    scripts = [word.rpartition("/")[2] for word in words if word.endswith(".py")]
    return scripts[0] if scripts else process.name()
