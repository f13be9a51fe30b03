"""Costs of work on a typical worker of a pool, from the latency model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.autoscaling import tuning
from cluster.latency.calibration import RegimeCalibration
from cluster.latency.latency_model import LatencyModel
from cluster.registry.workers import WorkerInfo


class PoolCosts(Protocol):
    """Costs of the typical worker of a pool.

    Attributes:
        chunk_tokens: token budget of one step.
        max_num_seqs: largest number of sequences in one step.
        kv_tokens: size of the KV cache in tokens; 0 if unknown.
    """

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def is_measured(self) -> bool:
        """Whether there are enough samples. The autoscaler must not start workers on a guess."""
        ...

    def prefill_ms(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Milliseconds of a prompt on an idle worker, until its first token."""
        ...

    def tpot_ms(self, batch: int, context_tokens: float) -> float:
        """Milliseconds per output token in a batch of ``batch`` sequences, with the usual drafts.

        Args:
            context_tokens: mean context of one sequence.
        """
        ...

    def plain_tpot_ms(self, batch: int, context_tokens: float) -> float:
        """Milliseconds per output token without drafts; arguments as for :meth:`tpot_ms`."""
        ...

    def tokens_per_round(self, batch: int) -> float:
        """Tokens per sequence from a step of ``batch`` sequences."""
        ...

    def handoff_ms(self, tokens: float) -> float:
        """Milliseconds to transfer the KV of ``tokens`` prompt tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Implements :class:`PoolCosts` with the median worker of a pool, so that outliers have no effect.

    Costs are those of its steps, without the model's calibration. The calibration includes queueing and interleaved
    prompts, which the forecasts compute themselves and would count twice. Only the slowdown of workers that share a
    processor is taken from it, since step samples do not show it.

    Attributes:
        link: (prefill worker, decode worker) of the typical hand-off.
        contended: True if workers of both pools share processors.
    """

    model: LatencyModel
    info: WorkerInfo
    link: tuple[str, str]
    contended: bool = False

    @property
    def chunk_tokens(self) -> int:
        return self.info.chunk_tokens

    @property
    def max_num_seqs(self) -> int:
        return self.info.max_num_seqs

    @property
    def kv_tokens(self) -> int:
        return self.info.kv_blocks * self.info.block_size

    @property
    def is_measured(self) -> bool:
        return self.model.num_samples(self.info.worker_id) >= tuning.MIN_STEP_SAMPLES

    def prefill_ms(self, uncached_tokens: float, cached_tokens: float) -> float:
        uncached, cached = max(1, round(uncached_tokens)), round(cached_tokens)
        ms = self.model.prefill_ms(self.info.worker_id, uncached, cached).ms
        return ms * self._lost_to_others(self.model.ttft_calibration)

    def tpot_ms(self, batch: int, context_tokens: float) -> float:
        context, calibration = round(batch * context_tokens), self.model.tpot_calibration
        calibrated = self.model.predict_tpot(self.info.worker_id, batch, context, contended=self.contended).ms
        return calibrated / calibration.of(contended=self.contended).factor * self._lost_to_others(calibration)

    def plain_tpot_ms(self, batch: int, context_tokens: float) -> float:
        step_ms = self.model.step_ms(self.info.worker_id, batch, round(batch * context_tokens)).ms
        return step_ms * self._lost_to_others(self.model.tpot_calibration)

    def _lost_to_others(self, calibration: RegimeCalibration) -> float:
        return calibration.of(contended=True).factor if self.contended else 1.0

    def tokens_per_round(self, batch: int) -> float:
        return self.model.tokens_per_round(self.info.worker_id, batch)

    def handoff_ms(self, tokens: float) -> float:
        return self.model.transfer_ms(round(tokens * self.info.kv_bytes_per_token), self.link).ms


def costs_of(model: LatencyModel, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo]) -> dict[str, ModelCosts]:
    """Costs of each pool that has workers, by pool."""
    shared = {(info.node, info.device) for info in prefill} & {(info.node, info.device) for info in decode}
    contended = any(device == "cpu" for _, device in shared)
    middles = [_middle(model, workers) for workers in (prefill, decode) if workers]
    link = (middles[0].worker_id, middles[-1].worker_id) if middles else ("", "")
    return {info.pool: ModelCosts(model, info, link, contended) for info in middles}


def _middle(model: LatencyModel, workers: Sequence[WorkerInfo]) -> WorkerInfo:
    def speed(info: WorkerInfo) -> float:
        prompt = model.prefill_ms(info.worker_id, tuning.REFERENCE_TOKENS).ms
        return (
            prompt
            + model.step_ms(info.worker_id, tuning.REFERENCE_BATCH, tuning.REFERENCE_BATCH * tuning.REFERENCE_TOKENS).ms
        )

    # A worker that has just started has too few samples.
    known = [info for info in workers if model.num_samples(info.worker_id) >= tuning.MIN_STEP_SAMPLES] or workers
    return sorted(known, key=speed)[len(known) // 2]
