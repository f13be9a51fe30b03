"""Fake workers, requests and candidates for tests of routing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from hypothesis import strategies as st

from baton.core.roles import DECODE, PREFILL
from baton.core.slo import BUILTIN_CLASSES
from cluster.latency.calibration import RequestHabits
from cluster.latency.estimates import PromptQueue, WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.routing.request_predictions import RouteForecaster
from cluster.routing.routing_config import RoutingConfig
from cluster.routing.routing_contracts import Candidates, RouteDecision, RoutingRequest, WorkerSnapshot
from cluster.routing.routing_profile import LocalPrefill, RoutingProfile, build_profile, routes

REQUEST = RoutingRequest("r", 400, max_tokens=64, output_tokens=64.0)
NUM_WORKERS = 4


def prefill_worker(number: int = 0, **changes: Any) -> WorkerSnapshot:
    snapshot = WorkerSnapshot(f"prefill-{number}", PREFILL, True, 0, 0, device="cuda:0", kv_bytes_per_token=40_000)
    return replace(snapshot, **changes)


def decode_worker(number: int = 0, **changes: Any) -> WorkerSnapshot:
    snapshot = WorkerSnapshot(f"decode-{number}", DECODE, True, 0, 0, device="cuda:0", kv_bytes_per_token=40_000)
    return replace(snapshot, **changes)


def queue(tokens: int, prompts: int = 1, **changes: Any) -> PromptQueue:
    return PromptQueue(tokens=tokens, attention_pairs=tokens * tokens // 2, prompts=prompts, **changes)


def forecaster(model: LatencyModel | None = None) -> RouteForecaster:
    model = model or LatencyModel()
    for number in range(NUM_WORKERS):
        model.add_worker(f"prefill-{number}", WorkerTraits((PREFILL,), 512))
        model.add_worker(f"decode-{number}", WorkerTraits((DECODE,), 512))
    return RouteForecaster(model, RequestHabits())


def make_candidates(
    prefill: Sequence[WorkerSnapshot],
    decode: Sequence[WorkerSnapshot],
    request: RoutingRequest = REQUEST,
    local: LocalPrefill = LocalPrefill.AUTO,
) -> Candidates:
    indices = routes(len(prefill), len(decode), local)
    return Candidates(request, prefill, decode, *indices, forecaster().forecast(prefill, decode, *indices, request))


def choose(
    prefill: Sequence[WorkerSnapshot],
    decode: Sequence[WorkerSnapshot],
    request: RoutingRequest = REQUEST,
    model: LatencyModel | None = None,
    **config: Any,
) -> RouteDecision | None:
    return profile(model, **config).choose(prefill, decode, request)


def profile(model: LatencyModel | None = None, **config: Any) -> RoutingProfile:
    return build_profile(RoutingConfig(**config), forecaster(model))


def _snapshots(pool: str, least: int) -> st.SearchStrategy[list[WorkerSnapshot]]:
    def build(number: int, values: dict[str, Any]) -> WorkerSnapshot:
        batch = values["batch"]
        return WorkerSnapshot(
            f"{pool}-{number}",
            pool,
            queue=PromptQueue(values["tokens"], values["tokens"] ** 2, bool(values["tokens"]), 5.0, batch, 99 * batch),
            context_tokens=99 * batch,
            backlog_tokens=values["tokens"],
            **{name: values[name] for name in values if name != "tokens"},
        )

    fields = st.fixed_dictionaries(
        {
            "accepting": st.booleans(),
            "in_flight": st.integers(0, 50),
            "assigned": st.integers(0, 1000),
            "tokens": st.sampled_from([0, 0, 10, 4000, 10**6]),
            "batch": st.integers(0, 80),
            "cached_tokens": st.integers(0, 600),
            "kv_tokens": st.sampled_from([0, 100, 10_000]),
            "max_num_seqs": st.sampled_from([1, 64]),
            "kv_bytes_per_token": st.sampled_from([0, 40_000]),
            "device": st.sampled_from(["cpu", "cuda:0"]),
            "node": st.sampled_from(["a", "b"]),
            "tpot_target_s": st.sampled_from([0.05, 0.5, inf]),
            "last_assigned_s": st.floats(-10.0, 10.0),
        }
    )
    return st.lists(fields, min_size=least, max_size=NUM_WORKERS).map(
        lambda rows: [build(number, values) for number, values in enumerate(rows)]
    )


requests = st.builds(
    RoutingRequest,
    st.just("r"),
    st.integers(1, 5000),
    slo=st.sampled_from(BUILTIN_CLASSES),
    max_tokens=st.integers(1, 500),
    elapsed_ms=st.floats(0.0, 1e5),
    output_tokens=st.floats(1.0, 500.0),
)
prefill_pools = _snapshots(PREFILL, 0)
decode_pools = _snapshots(DECODE, 1)


def shuffled(workers: Sequence[WorkerSnapshot], seed: int) -> list[WorkerSnapshot]:
    return random.Random(seed).sample(list(workers), len(workers))
