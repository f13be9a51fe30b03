"""Credentials of workers in tests that have no controller."""

from __future__ import annotations

from functools import partial

from baton.rpc.credentials import ClusterSecret, PeerCredentials
from baton.rpc.wire import worker_pb2
from cluster.registry.worker_client import WorkerClient

SECRET = bytes(range(32))
CREDENTIALS = PeerCredentials(ClusterSecret(SECRET))
connect = partial(WorkerClient, credentials=CREDENTIALS)


def send_to(handoff: worker_pb2.Handoff, address: str) -> None:
    """Names a peer as the router does, with the proof that it has from the worker."""
    handoff.peer, handoff.peer_proof = address, CREDENTIALS.secret.peer_proof(address)
