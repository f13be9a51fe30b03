"""Whether the workers of a configuration fit on their GPUs, from the model's config alone: no weights are read.

``python -m cluster.worker.fit`` takes a configuration as JSON on standard input and prints the rows as JSON. It is a
process of its own, because the control plane does without torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from baton.core.accelerators import MEMORY_BYTES, WITH_FP8
from baton.core.errors import BatonError, UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.roles import DECODE, PREFILL
from baton.engine.models.footprint import Footprint, footprint_of
from baton.engine.models.model_config import check_context_length
from baton.engine.models.model_loader import check_architecture, context_length, load_config, stored_dtype
from baton.engine.models.model_source import resolve_model
from baton.engine.models.model_weights import stored_bytes
from baton.engine.models.quantized.schemes import check_scheme, scheme_of
from baton.engine.runner.cuda_graphs import make_buckets
from baton.engine.runner.device_memory import BYTES_PER_GRAPH, CONTEXT_BYTES, SIDE_WORKSPACE_BYTES
from baton.process.parent import end_with
from cluster.config.config import BatonConfig
from cluster.config.fit_rows import FitRow
from cluster.config.worker_config import PoolConfig

_GRAPH_TOKENS = 512
_DEGREES = (1, 2, 4, 8, 16, 32)
_GPUS_OF_A_NODE = 8
_GIB = 2**30


class FitChecker:
    """Computes footprints of one model, each once.

    Args:
        config: the configuration of the cluster.

    Raises:
        BatonError: the model does not exist, its architecture or quantization is not supported, or its context is
            shorter than ``max_model_len``.
    """

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._source = resolve_model(config.model)
        self._model_config = load_config(self._source)
        check_architecture(self._model_config)
        check_context_length(config.max_model_len, context_length(self._model_config))
        self._scheme = scheme_of(self._model_config)
        if self._scheme is not None:
            check_scheme(self._scheme, config.engine.weights)
        self._dtype = stored_dtype(self._model_config) if config.dtype == "auto" else config.dtype
        self._known: dict[tuple[int, str, str], Footprint] = {}

    def row(self, name: str) -> FitRow:
        """The row of a pool."""
        pool, engine = self._config.pool(name), self._config.engine
        row = self._row(name, pool.num_ranks, engine.weights, engine.kv_cache, pool.resources.gpus)
        if row.problem and (pool.resources.accelerator_type in MEMORY_BYTES or not pool.resources.gpus):
            row.remedies = self._remedies(name, pool, row)
        return row

    def _row(self, name: str, num_ranks: int, weights: str, kv_cache: str, gpus: float) -> FitRow:
        config, pool = self._config, self._config.pool(name)
        found = self._footprint(num_ranks, weights, kv_cache)
        rows = pool.max_num_seqs * (1 + self._draft_tokens(name))
        has_graphs = name == DECODE and config.engine.cuda_graphs == "auto"
        step = found.step_bytes(max(pool.chunk_tokens, rows), min(rows, max(pool.chunk_tokens, pool.max_num_seqs)))
        graphs = self._graph_bytes(name, found) if has_graphs else 0
        gpu = pool.resources.accelerator_type
        row = FitRow(
            pool=name,
            workers=pool.workers,
            num_ranks=num_ranks,
            gpus=gpus,
            gpu=(gpu or "GPU") if gpus else "",
            num_parameters=found.num_parameters,
            weights=found.weights,
            step=step + graphs,
            kv_per_token=found.kv_per_token,
            whole_kv_per_token=found.whole_kv_per_token,
        )
        if self._scheme is not None and weights == "native" and num_ranks > 1:
            row.problem = f"{self._scheme.name} cannot be divided among ranks as it is stored"
        if row.problem or not gpus:
            return row
        if gpu not in MEMORY_BYTES:
            row.problem = (
                f"the memory of its GPUs is not known: set {name}.resources.accelerator_type to one of "
                f"{', '.join(MEMORY_BYTES)}"
            )
            return row
        row.memory = MEMORY_BYTES[gpu]
        share = min(1.0, gpus)
        kept = CONTEXT_BYTES + row.weights + row.step
        room = int(row.memory * config.engine.gpu_memory_utilization * share) - kept
        wanted = self._wanted_bytes(pool, found)
        row.kv_tokens = max(0, (room if wanted is None else wanted) // found.kv_per_token)
        longest = config.max_model_len or 2
        if wanted is not None and wanted + kept > row.memory * share:
            row.problem = f"a KV cache of {wanted / _GIB:.1f} GiB does not fit beside weights and the largest step"
        elif row.kv_tokens < longest:
            row.problem = (
                "weights and the largest step leave no room for KV"
                if not row.kv_tokens
                else f"a request of max_model_len {longest} does not fit into a KV cache of {row.kv_tokens} tokens"
            )
        return row

    def _draft_tokens(self, name: str) -> int:
        speculation = self._config.speculation
        if name != DECODE or speculation.method == "none":
            return 0
        return speculation.largest_draft

    def _graph_bytes(self, name: str, found: Footprint) -> int:
        buckets = make_buckets(self._config.pool(name).max_num_seqs, self._draft_tokens(name))
        return len(buckets) * BYTES_PER_GRAPH + SIDE_WORKSPACE_BYTES + found.step_bytes(_GRAPH_TOKENS, _GRAPH_TOKENS)

    def _wanted_bytes(self, pool: PoolConfig, found: Footprint) -> int | None:
        if pool.kv_blocks is not None:
            return pool.kv_blocks * self._config.engine.block_size * found.kv_per_token
        return None if pool.kv_memory_gib is None else int(pool.kv_memory_gib * _GIB)

    def _footprint(self, num_ranks: int, weights: str, kv_cache: str) -> Footprint:
        key = num_ranks, weights, kv_cache
        if key not in self._known:
            own = weights if weights == "fp8" else "native"
            is_plain = self._scheme is None or weights != "native"
            encoding = KVEncoding(kv_cache)
            found = footprint_of(self._model_config, self._dtype, num_ranks, own, encoding, is_plain=is_plain)
            if not is_plain:
                found = replace(found, weights=stored_bytes(self._source) or found.weights)
            self._known[key] = found
        return self._known[key]

    def _remedies(self, name: str, pool: PoolConfig, row: FitRow) -> list[str]:
        """Single changes with which the pool fits; if there are none, pairs."""
        engine, own = self._config.engine, pool.resources.gpus

        def fits(num_ranks: int, weights: str, kv_cache: str, gpus: float) -> bool:
            try:
                return not self._row(name, num_ranks, weights, kv_cache, gpus).problem
            except UnsupportedModelError:  # it cannot be divided so often
                return False

        def more_gpus(weights: str) -> list[str]:
            found = next(
                (more for more in _DEGREES if own and more > own and fits(more, weights, engine.kv_cache, more)), 0
            )
            note = f" (on nodes with {found})" if found > _GPUS_OF_A_NODE else ""
            return [f"{name}.resources.gpus: {found}{note}"] if found else []

        found = more_gpus(engine.weights)
        is_readable = self._scheme is None or bool(self._scheme.formats)
        others = ["dequantized"] if self._scheme is not None and is_readable else []
        has_fp8 = pool.resources.accelerator_type in WITH_FP8
        others += ["fp8"] if is_readable and self._dtype == "bfloat16" and has_fp8 else []
        others = others if engine.weights == "native" else []
        found += [f"engine.weights: {other}" for other in others if fits(pool.num_ranks, other, engine.kv_cache, own)]
        if engine.kv_cache == "native" and fits(pool.num_ranks, engine.weights, "int8", own):
            found.append("engine.kv_cache: int8")
        if (self._config.max_model_len or 0) > row.kv_tokens >= 2:
            found.append(f"max_model_len: {row.kv_tokens}")
        return found or [f"engine.weights: {other} with {more}" for other in others for more in more_gpus(other)]


def check(config: BatonConfig) -> list[FitRow]:
    """A row for each pool.

    Raises:
        BatonError: the model does not exist, or cannot be served or divided like this.
    """
    checker = FitChecker(config)
    return [checker.row(name) for name in (PREFILL, DECODE)]


def main() -> None:
    """Reads a configuration, and prints ``{"rows": [...]}`` or ``{"error": ..., "code": ...}``.

    The argument is the process id of the parent, with which this process ends.
    """
    end_with(int(sys.argv[1]))
    answer: dict[str, Any]
    try:
        answer = {"rows": [asdict(row) for row in check(BatonConfig.from_dict(json.load(sys.stdin)))]}
    except BatonError as error:
        answer = {"error": error.message, "code": error.code}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
