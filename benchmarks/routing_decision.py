"""What a routing decision takes: ``python -m benchmarks.routing_decision``.

A router's dispatcher with made-up workers that are busy with made-up requests; nothing is sent anywhere. A decision is
what a request pays once before it is sent: a look at all workers, their caches and queues, scores, record and booking.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from baton.bench.latency import percentile
from baton.core.block_hashes import HASH_BYTES
from baton.core.request import SamplingParams
from baton.core.roles import DECODE, PREFILL
from baton.core.timeline import Event, Timeline
from baton.rpc.wire import worker_pb2
from cluster.latency.error_metrics import PredictionErrors
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.registry.worker_client import WorkerClient
from cluster.registry.workers import WorkerInfo, WorkerRegistry
from cluster.requests.generation import GenerationRequest
from cluster.requests.journal import Journal
from cluster.routing.dispatcher import Dispatcher, Placement
from cluster.routing.profile import build_profile
from cluster.routing.request_predictions import RequestPredictions
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_metrics import RoutingMetrics

_POOLS = ((1, 1), (4, 4), (16, 48))
_PROMPT_TOKENS = 2048
_STREAMS_PER_DECODE_WORKER = 40
_PROMPTS_PER_PREFILL_WORKER = 8
_BLOCK_SIZE = 16
_TIMEOUT_S = 600.0


class _Unconnected(WorkerClient):
    """A connection that nobody uses needs no channel."""

    def __init__(self, address: str) -> None:
        self.address = address


def measure(num_prefill: int, num_decode: int, num_decisions: int) -> list[float]:
    """Microseconds of each of some decisions."""
    registry = WorkerRegistry(_Unconnected)
    predictions = RequestPredictions(LatencyModel(), PredictionErrors())
    for pool, count in ((PREFILL, num_prefill), (DECODE, num_decode)):
        for number in range(count):
            info = _info(pool, number)
            registry.add(info)
            predictions.model.add_worker(info.worker_id, WorkerTraits((pool,), info.chunk_tokens))
    metrics = RoutingMetrics(CollectorRegistry())
    chooser = build_profile(RoutingConfig(), predictions.forecaster, metrics.observe_scorer)
    index = PrefixIndex(_BLOCK_SIZE)
    for worker in registry.workers:  # else nothing would be looked up
        index.apply(worker.info.worker_id, worker_pb2.CacheEvents(stored=random.randbytes(HASH_BYTES)))
    dispatcher = Dispatcher(registry, predictions, chooser, index, metrics=metrics)
    for number in range(num_decode * _STREAMS_PER_DECODE_WORKER):
        placement = _dispatch(dispatcher, _journal(f"under way {number}"))
        if number >= num_prefill * _PROMPTS_PER_PREFILL_WORKER:
            placement.took(1)
    taken_us = []
    gc.disable()
    for number in range(num_decisions):
        journal = _journal(str(number))
        began_s = time.perf_counter()
        placement = _dispatch(dispatcher, journal)
        taken_us.append((time.perf_counter() - began_s) * 1e6)
        placement.release()
    gc.enable()
    return taken_us


def _dispatch(dispatcher: Dispatcher, journal: Journal) -> Placement:
    decision = dispatcher.forecast(journal)
    if decision is None:
        raise RuntimeError("no worker takes the request")
    return dispatcher.book(journal, decision)


def _journal(request_id: str) -> Journal:
    timeline = Timeline(request_id)
    timeline.record(Event.RECEIVED)
    first = random.randrange(100_000)
    prompt = tuple(range(first, first + _PROMPT_TOKENS))
    return Journal(GenerationRequest(request_id, prompt, SamplingParams(max_tokens=256), timeline), _TIMEOUT_S)


def _info(pool: str, number: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{pool}-{number}",
        pool=pool,
        address="",
        node=f"node-{number // 8}",
        pid=0,
        device="cuda:0",
        model_name="model",
        max_model_len=32_768,
        vocab_size=128_000,
        eos_token_ids=(2,),
        kv_fingerprint="",
        kv_bytes_per_token=131_072,
        block_size=_BLOCK_SIZE,
        dtype="bfloat16",
        draft_method="",
        max_num_seqs=256,
        kv_blocks=40_000,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_decision", description=__doc__)
    parser.add_argument("--decisions", type=int, default=1000, metavar="N", help="for each size (default: 1000)")
    options = parser.parse_args(arguments)
    sys.stdout.write("workers          p50        p99   µs per decision\n")
    for num_prefill, num_decode in _POOLS:
        taken_us = measure(num_prefill, num_decode, options.decisions)
        name = f"{num_prefill}+{num_decode}"
        sys.stdout.write(f"{name:<10} {percentile(taken_us, 50):>9.0f}  {percentile(taken_us, 99):>9.0f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
