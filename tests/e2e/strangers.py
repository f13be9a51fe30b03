"""Connects to every TCP port of a tree of processes without certificate, key or token, and reports what answers."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import psutil

from baton.rpc.certificates import CLUSTER_NAME

_REQUESTS = (
    *(("GET", path) for path in ("/", "/health", "/ready", "/metrics", "/v1/models", "/v1/requests", "/admin/status")),
    *(("GET", path) for path in ("/api/version", "/api/healthz", "/nodes")),
    ("POST", "/v1/completions"),
    ("POST", "/get_or_create_runtime_env"),
)
HEALTH = "/grpc.health.v1.Health/Check"
NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_METHODS = (
    HEALTH,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/baton.v1.Worker/Ping",
    "/baton.v1.KVTransfer/Transfer",
    NODES,
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.autoscaler.AutoscalerStateService/GetClusterStatus",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ReporterService/GetTraceback",
)
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "::1": "[::1]"}
_TIMEOUT_S = 5.0


@dataclass(frozen=True, order=True)
class Port:
    """A listening TCP port and the program that opened it."""

    program: str
    host: str
    number: int


def listening_ports(pid: int) -> list[Port]:
    """The ports at which a process, here named ``driver``, and its descendants listen."""
    root = psutil.Process(pid)
    found: set[Port] = set()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            program = "driver" if process == root else _program(process)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host = connection.laddr.ip.removeprefix("::ffff:")
                    found.add(Port(program, _LOOPBACK.get(host, host), connection.laddr.port))
    return sorted(found)


def answers(port: Port, authority: bytes) -> Iterator[str]:
    """What the port answers with success, such as ``HTTPS GET /path`` or ``gRPC /service/method``.

    Args:
        authority: certificate of the cluster's authority, in PEM format, by which a stranger may verify servers.
    """
    for kind in ("HTTP", "HTTPS"):
        yield from (f"{kind} {method} {path}" for method, path in _REQUESTS if _answers_http(port, kind, method, path))
    for kind in ("gRPC", "gRPC over TLS"):
        yield from (
            f"{kind} {name}" for name in _METHODS if status_of(port, name, kind, authority) is grpc.StatusCode.OK
        )


def status_of(port: Port, method: str, kind: str = "gRPC", authority: bytes = b"") -> grpc.StatusCode:
    """How the port answers an empty call without credentials."""
    address = f"{port.host}:{port.number}"
    if kind == "gRPC":
        channel = grpc.insecure_channel(address)
    else:
        options = [("grpc.ssl_target_name_override", CLUSTER_NAME)]
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
    with channel:
        try:
            channel.unary_unary(method)(b"", timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def _answers_http(port: Port, kind: str, method: str, path: str) -> bool:
    connection = http.client.HTTPConnection(port.host, port.number, timeout=_TIMEOUT_S)
    if kind == "HTTPS":
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(port.host, port.number, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request(method, path)
        return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _program(process: psutil.Process) -> str:
    """A name that stays the same from run to run, such as ``raylet`` or ``ray::RouterActor``."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    scripts = [word.rpartition("/")[2] for word in words if word.endswith(".py")]
    return scripts[0] if scripts else process.name()
