"""Proof of membership: every call between the processes of a cluster carries a token that only members can make.

A token is an HMAC of the cluster's secret and the address that is called, so a token that one server has seen opens no
other server. The secret itself is never sent. Without certificates the connection is plain text; with them it is
mutual TLS (``certificates.py``), and the tokens are checked as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.core.errors import InvalidRequestError
from baton.rpc.certificates import Certificates

TOKEN_KEY = "baton-token"
_SECRET_BYTES = 32


def create_secret() -> bytes:
    """Creates the secret of a new cluster."""
    return secrets.token_bytes(_SECRET_BYTES)


class ClusterSecret:
    """The secret that all processes of one cluster share. Its values for different purposes are independent.

    Args:
        key: the secret, from :func:`create_secret`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "ClusterSecret(...)"  # keeps the key out of logs and tracebacks

    def call_token(self, address: str) -> str:
        """The token of calls to the server at ``address`` (``host:port``)."""
        return self._derive("call", address)

    def peer_proof(self, address: str) -> str:
        """A worker's proof that it serves at ``address``; other workers send KV only to addresses with such a proof."""
        return self._derive("peer", address)

    def check_peer(self, address: str, proof: str) -> None:
        """Raises :class:`InvalidRequestError` unless ``proof`` is the :meth:`peer_proof` of ``address``."""
        if not hmac.compare_digest(proof.encode(), self.peer_proof(address).encode()):
            raise InvalidRequestError("The hand-off names a peer that has not proved to be a worker of this cluster.")

    @property
    def block_hash_key(self) -> bytes:
        """The key of content hashes of KV blocks (``baton.core.block_hashes``), 32 bytes."""
        return bytes.fromhex(self._derive("block hashes", ""))

    def _derive(self, purpose: str, value: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{value}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What a process needs to call other processes of its cluster and to be called by them.

    Attributes:
        certificates: returns those of this node, which may be renewed; ``None`` means that connections are not
            encrypted.
    """

    secret: ClusterSecret
    certificates: Callable[[], Certificates] | None = None

    def current_certificates(self) -> Certificates | None:
        return None if self.certificates is None else self.certificates()

    def call_metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """The metadata of calls to the server at ``address``."""
        return ((TOKEN_KEY, self.secret.call_token(address)),)


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the token of this server, before its message is read.

    Attributes:
        address: the server's address, known once it is bound; until then all calls are refused.
    """

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret
        self._token = ""

    def serve_at(self, address: str) -> None:
        """Accepts calls for the server at ``address``."""
        self._token = self._secret.call_token(address)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_KEY and self._token and hmac.compare_digest(str(value).encode(), self._token.encode()):
                return await continuation(handler_call_details)
        # A handler of this kind is called without waiting for a message, and suits clients of every kind.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call does not come from a process of this cluster")
    raise AssertionError("abort returned")
