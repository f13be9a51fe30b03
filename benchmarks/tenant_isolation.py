"""Whether one API key can tell what another one has sent: ``python -m benchmarks.tenant_isolation [--help]``.

Starts a cluster with two keys and a prefill and a decode worker. In each try, key A sends a new prompt, then sends it
again; key B sends A's prompt, and another new one of the same length, in an order drawn by lot. B learns something if
any answer has ``cached_tokens``, or if its times to the first token are shorter for A's prompts than for new ones: a
one-sided Mann-Whitney U test over all tries. A's own second times show that a cached prompt would be noticed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from scipy.stats import mannwhitneyu

from baton.bench.latency import percentile
from benchmarks.first_tokens import first_tokens, new_prompt
from benchmarks.options import HelpFormatter, at_least
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

LEVEL = 0.01
"""A smaller p-value counts as a difference; without one, chance gives it in one of a hundred measurements."""
_KEYS = {"A": "key-of-tenant-a-0001", "B": "key-of-tenant-b-0001"}
_TIMEOUT_S = 120.0
_KINDS = {
    "new": "B, new prompts",
    "foreign": "B, prompts that A has sent",
    "first": "A, first time",
    "own": "A, second time",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """One kind of request over all tries.

    Attributes:
        ttft_s: times from sending a request until its first token, in seconds.
        cached_tokens: of each request, those of its own prompt that a prefix cache of either worker held.
    """

    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


def p_value(shorter: Sequence[float], longer: Sequence[float]) -> float:
    """How likely times that are at least so much shorter are if both come from the same distribution."""
    return float(mannwhitneyu(shorter, longer, alternative="less").pvalue)


def is_isolated(answers: dict[str, Answers]) -> bool:
    """Whether key B learns nothing, in a measurement that would have noticed it."""
    foreign, new = answers["foreign"], answers["new"]
    would_notice = p_value(answers["own"].ttft_s, answers["first"].ttft_s) < LEVEL and all(answers["own"].cached_tokens)
    return would_notice and not any(foreign.cached_tokens) and p_value(foreign.ttft_s, new.ttft_s) >= LEVEL


class Tenants:
    """Both keys' client of a running cluster."""

    def __init__(self, endpoint: str, http: httpx.Client) -> None:
        self._endpoint = endpoint
        self._http = http

    def measure(self, num_tries: int, num_tokens: int, seed: int) -> dict[str, Answers]:
        """Answers by kind of request, with prompts of ``num_tokens``."""
        chance = random.Random(seed)
        answers = {kind: Answers() for kind in _KINDS}
        for _ in range(num_tries):
            known, new = new_prompt(chance, num_tokens), new_prompt(chance, num_tokens)
            self._send("A", known, answers["first"])
            self._send("A", known, answers["own"])
            for kind in chance.sample(["foreign", "new"], 2):
                self._send("B", known if kind == "foreign" else new, answers[kind])
        return answers

    def _send(self, key: str, prompt: Sequence[int], answers: Answers) -> None:
        sent = first_tokens(self._http, self._endpoint, prompt, _KEYS[key])
        path = f"{self._endpoint}/v1/requests/{sent.request_id}/timeline"
        headers = {"Authorization": f"Bearer {_KEYS[key]}"}
        found = self._http.get(path, headers=headers).raise_for_status().json()["attributes"]
        answers.ttft_s.append(sent.first_s)
        answers.cached_tokens.append(max(found["cached_tokens"], found["kv_cached_tokens"]))


def show(answers: dict[str, Answers]) -> Table:
    """A row for each kind of request."""
    table = Table("", "requests", "with cached tokens", "TTFT p5", "p50", "p95", box=None)
    for kind, label in _KINDS.items():
        times = answers[kind].ttft_s
        num_cached = sum(count > 0 for count in answers[kind].cached_tokens)
        shares = (f"{percentile(times, share) * 1e3:.1f} ms" for share in (5, 50, 95))
        table.add_row(label, str(len(times)), str(num_cached), *shares)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--tries", type=at_least(10), default=200, help="number of tries")
    parser.add_argument("--tokens", type=at_least(16), default=320, help="length of the prompts")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and order")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    options = parser.parse_args()
    console = Console(width=100)
    settings = {
        "router": {"port": 0, "api_keys": [{"name": name, "key": key} for name, key in _KEYS.items()]},
        "routing": {"local_prefill": "never"},
    }
    cluster = Cluster.start(BatonConfig.from_dict(settings), console.print)
    try:
        with httpx.Client(timeout=_TIMEOUT_S) as http:
            tenants = Tenants(cluster.endpoint, http)
            tenants.measure(10, options.tokens, options.seed + 1)  # warm-up
            answers = tenants.measure(options.tries, options.tokens, options.seed)
    finally:
        cluster.stop()
    console.print(show(answers))
    console.print(
        f"p-value of shorter times: {p_value(answers['foreign'].ttft_s, answers['new'].ttft_s):.2g} for B with A's "
        f"prompts, {p_value(answers['own'].ttft_s, answers['first'].ttft_s):.2g} for A's second ones"
    )
    if options.json:
        document = {"format": "baton-tenant-isolation", **{kind: asdict(each) for kind, each in answers.items()}}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if is_isolated(answers) else "The keys are not isolated, or the measurement is too coarse.")


if __name__ == "__main__":
    main()
