"""What certificates cost in latency: ``python -m benchmarks.certificate_cost [--help]``.

Starts a cluster with and one without `security`, in turn, and sends prompts that no cache holds, one at a time. No
memory is shared, as between hosts: KV goes through a socket, or through encrypted gRPC messages. The first token does
not wait for the hand-off, the second one does.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console
from rich.table import Table

from baton.bench.latency import percentile
from benchmarks.first_tokens import FirstTokens, first_tokens, new_prompt
from benchmarks.options import HelpFormatter, at_least
from cluster.cli.cli_certs import create_certificates
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

_NODE = "here"
_TIMEOUT_S = 120.0
_WARM_UP = 5
_SETTINGS = {
    "router": {"port": 0},
    "routing": {"local_prefill": "never"},
    "kv_transfer": {"shared_memory": "off"},
}


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of one cluster."""

    is_encrypted: bool
    requests: list[FirstTokens]


def measure(config: BatonConfig, num_requests: int, num_tokens: int, seed: int) -> list[FirstTokens]:
    """Starts a cluster, sends it prompts of ``num_tokens``, and stops it."""
    chance = random.Random(seed)
    cluster = Cluster.start(config, lambda line: None)
    try:
        with httpx.Client(timeout=_TIMEOUT_S) as http:
            for _ in range(_WARM_UP):
                first_tokens(http, cluster.endpoint, new_prompt(chance, num_tokens))
            return [first_tokens(http, cluster.endpoint, new_prompt(chance, num_tokens)) for _ in range(num_requests)]
    finally:
        cluster.stop()


def show(rounds: Sequence[Round]) -> Table:
    """A row for each kind of cluster, over all of its rounds."""
    table = Table("", "requests", "TTFT p50", "p95", "second token p50", "p95", box=None)
    for label, is_encrypted in (("plain", False), ("mutual TLS", True)):
        found = [request for each in rounds if each.is_encrypted is is_encrypted for request in each.requests]
        if not found:
            continue
        times = [[request.first_s for request in found], [request.second_s for request in found]]
        shares = (f"{percentile(each, share) * 1e3:.1f} ms" for each in times for share in (50, 95))
        table.add_row(label, str(len(found)), *shares)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="clusters of each kind")
    parser.add_argument("--requests", type=at_least(5), default=50, help="requests to each cluster")
    parser.add_argument("--tokens", type=at_least(16), default=512, help="length of the prompts")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    options = parser.parse_args()
    console, plain = Console(width=100), BatonConfig.from_dict(_SETTINGS)
    rounds: list[Round] = []
    with TemporaryDirectory() as folder:
        create_certificates(Path(folder), [_NODE], 1)
        own = Path(folder) / _NODE
        files = {"ca": own / "ca.pem", "certificate": own / "node.pem", "key": own / "node.key"}
        settings = {**_SETTINGS, "security": {name: str(path) for name, path in files.items()}}
        encrypted = BatonConfig.from_dict(settings)
        for number in range(options.rounds):
            for config in (plain, encrypted):
                requests = measure(config, options.requests, options.tokens, number)
                rounds.append(Round(config is encrypted, requests))
                console.print(show(rounds[-1:]))
    console.print(show(rounds))
    if options.json:
        document = {"format": "baton-certificate-cost", "rounds": [asdict(each) for each in rounds]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
