"""The ``WorkerInfo`` of fake workers. Imports little, because each fake host's process imports it anew."""

from __future__ import annotations

from cluster.registry.workers import WorkerInfo
from tests.credentials import CREDENTIALS


def make_info(worker_id: str, pool: str, address: str = "127.0.0.1:1", **changes: object) -> WorkerInfo:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "pool": pool,
        "address": address,
        "peer_proof": CREDENTIALS.secret.peer_proof(address),
        "node": "here",
        "pid": 1,
        "device": "cpu",
        "model_name": "fake",
        "max_model_len": 4096,
        "vocab_size": 100_000,
        "eos_token_ids": (2,),
        "kv_fingerprint": "same",
        "kv_bytes_per_token": 1,
        "block_size": 16,
        "dtype": "float32",
        "draft_method": "",
    }
    return WorkerInfo.from_dict({**values, **changes})
