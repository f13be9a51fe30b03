"""One latency model for all decisions: it predicts prompts, steps and hand-offs on each worker.

    step_ms     = c0 + c1·prompt tokens + c2·attention pairs + c3·sequences + c4·context tokens + c5·drafted tokens
    prefill_ms  = sum of these steps over the chunks of the prompt; chunking repeats only c0 and c3
    transfer_ms = d0 + d1·bytes

Every worker fits the costs of its own steps, and the router fetches them every second. Transfers are fitted here, from
the parts of hand-offs, which name both ends.

See ``docs/latency-model.md``.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import ceil, sqrt
from typing import TypeVar

import numpy as np

from baton.core.cost_fit import MEASURED_WEIGHT, CostFit
from baton.core.robust_fit import Floats
from baton.core.speculation_rates import size_class
from baton.core.step_costs import StepCostReport
from cluster.latency.calibration import RegimeCalibration
from cluster.latency.cost_table import CostTable, PromptCosts, attention_pairs
from cluster.latency.estimates import Estimate, PromptQueue, WorkerTraits
from cluster.latency.worker_costs import WorkerCosts

Link = tuple[str, str]
"""(prefill worker, decode worker)."""

TRANSFER_PRIOR = (5.0, 2e-6)
"""Fixed milliseconds, and milliseconds per byte (500 MB/s), of a link between two nodes."""
_MAX_WAITING_TRANSFERS = 64
_TRANSFER_FIT_EVERY_S = 0.03
"""Time between two fits of links, which take part of a millisecond each."""
_MAX_LINKS_IN_MEAN = 256
_MAX_TABLES = 16

_Key = TypeVar("_Key")
_Table = TypeVar("_Table")


class LatencyModel:
    """Learns from samples and predicts. Not thread-safe. A prediction takes some microseconds.

    A worker that was never added gets the prior's predictions.

    Args:
        clock: monotonic seconds, for the age of samples; a simulation passes virtual time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers = WorkerCosts()
        self._usual_link = TRANSFER_PRIOR
        self._links: dict[Link, CostFit] = {}
        self._transfers: dict[Link, deque[tuple[float, float]]] = {}
        self._transfer_fit_due_s = float("-inf")
        self._tables: dict[tuple[str, ...], CostTable] = {}
        self._link_tables: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[Floats, Floats]] = {}
        self._rates: dict[tuple[str, int], tuple[float, float]] = {}
        self.ttft_calibration = RegimeCalibration()
        self.tpot_calibration = RegimeCalibration()

    def add_worker(self, worker_id: str, traits: WorkerTraits, prior: Sequence[float] = ()) -> None:
        """Adds a worker. Idempotent.

        Args:
            prior: coefficients of an earlier run, above zero, for the first worker of its kind.
        """
        self._workers.add(worker_id, traits, prior)
        self._forget_tables()

    def remove_worker(self, worker_id: str) -> None:
        """Removes a worker. The costs of its kind are kept."""
        self._workers.remove(worker_id)
        self._forget_tables()
        self._link_tables.clear()
        for link in [*self._links, *self._transfers]:
            if worker_id in link:
                self._links.pop(link, None)
                self._transfers.pop(link, None)

    def update_worker(self, worker_id: str, report: StepCostReport) -> None:
        """Takes what a worker has learned of its steps. Ignores impossible reports, and unknown workers."""
        self._workers.update(worker_id, report)
        self._forget_tables()

    def observe_transfer(self, link: Link, num_bytes: int, ms: float) -> None:
        """Learns from a hand-off. ``ms`` counts the time in which at least one of its parts was in transit.

        New samples of a link wait for its turn, since hand-offs end often and a fit takes part of a millisecond.
        """
        if not all(worker_id in self._workers for worker_id in link):
            return  # a worker may have left before the hand-off is reported, at the end of decoding
        waiting = self._transfers.setdefault(link, deque(maxlen=_MAX_WAITING_TRANSFERS))
        waiting.append((float(num_bytes), ms))
        now_s = self._clock()
        if now_s >= self._transfer_fit_due_s:
            self._transfer_fit_due_s = now_s + _TRANSFER_FIT_EVERY_S
            turn = next(iter(self._transfers))
            self._learn_link(turn, self._transfers.pop(turn), now_s)
            self._link_tables.clear()

    def snapshot(self, worker_ids: Iterable[str], link: Link) -> LatencyModel:
        """A copy of the model for some workers and one link, for use in another thread."""
        taken = LatencyModel(self._clock)
        taken._workers = self._workers.snapshot(worker_ids)
        taken._links = {link: copy.copy(self._links.get(link) or self._new_link())}
        taken.ttft_calibration = copy.deepcopy(self.ttft_calibration)
        taken.tpot_calibration = copy.deepcopy(self.tpot_calibration)
        return taken

    def coefficients(self, kind: tuple[str, ...]) -> tuple[float, ...] | None:
        """Coefficients of a kind of workers, as :meth:`add_worker` takes them; ``None`` if none has reported."""
        return self._workers.coefficients(kind)

    def num_samples(self, worker_id: str) -> int:
        """The number of steps that a worker has learned from so far."""
        return self._workers[worker_id].num_samples

    def prefill_ms(self, worker_id: str, uncached_tokens: int, context_tokens: int = 0) -> Estimate:
        """Predicts a prompt on an idle worker.

        Args:
            context_tokens: prompt tokens that the worker's cache holds.
        """
        worker = self._workers[worker_id]
        fixed, per_token, per_pair, per_sequence, _, _ = worker.costs
        steps = ceil(uncached_tokens / worker.traits.chunk_tokens)
        pairs = attention_pairs(uncached_tokens, context_tokens)
        ms = steps * (fixed + per_sequence) + per_token * uncached_tokens + per_pair * pairs
        return Estimate(ms, worker.sd * ms)

    def step_ms(self, worker_id: str, batch: int, context_tokens: int, drafted_tokens: float = 0.0) -> Estimate:
        """Predicts a decode step.

        Args:
            batch: number of sequences in it.
            context_tokens: tokens in the contexts of all of them together.
            drafted_tokens: drafted tokens that it verifies, for all sequences together.
        """
        worker = self._workers[worker_id]
        ms = worker.costs.decode_ms(batch, context_tokens, drafted_tokens)
        return Estimate(ms, worker.sd * ms)

    def tokens_per_round(self, worker_id: str, batch: int) -> float:
        """Measured tokens per sequence from a step of ``batch`` sequences; 1 without speculation."""
        return self._rates_of(worker_id, batch)[0]

    def transfer_ms(self, num_bytes: int, link: Link) -> Estimate:
        """Predicts a hand-off, from its first part to the last acknowledgement."""
        cost = self._links.get(link) or self._new_link()
        fixed, per_byte = cost.coefficients
        ms = fixed + per_byte * num_bytes
        return Estimate(ms, cost.sd * ms)

    def predict_tpot(
        self,
        worker_id: str,
        batch: int,
        context_tokens: int,
        output_tokens: float = 1e9,
        handoff_ms: float = 0.0,
        *,
        contended: bool = False,
    ) -> Estimate:
        """Predicts the mean time per output token after the first, calibrated with finished requests.

        Args:
            batch: sequences that will decode on the worker, this one included.
            context_tokens: tokens in the contexts of all of them together.
            output_tokens: expected output tokens of this sequence.
            handoff_ms: time between the first token and the first decode step, spread over the tokens.
            contended: another worker computes on the same processor.
        """
        tokens, drafted = self._rates_of(worker_id, batch)
        step_ms = self.step_ms(worker_id, batch, context_tokens, drafted * batch).ms
        calibration = self.tpot_calibration.of(contended=contended)
        ms = (step_ms / tokens + handoff_ms / max(1.0, output_tokens - 1)) * calibration.factor
        return Estimate(ms, ms * sqrt(self._workers[worker_id].sd ** 2 + calibration.spread**2))

    def prompt_costs(
        self,
        worker_ids: Sequence[str],
        uncached_tokens: Sequence[int] | Floats,
        context_tokens: Sequence[int] | Floats,
        queues: Sequence[PromptQueue],
    ) -> PromptCosts:
        """Costs of a prompt on each of many workers, without calibration."""
        rates = [
            self._rates_of(name, queue.decoding) if queue.decoding else (1.0, 0.0)
            for name, queue in zip(worker_ids, queues, strict=True)
        ]
        return self._table(worker_ids).prompt_costs(uncached_tokens, context_tokens, queues, np.array(rates))

    def token_ms(
        self, worker_ids: Sequence[str], batches: Sequence[int] | Floats, context_tokens: Sequence[int] | Floats
    ) -> Floats:
        """Milliseconds between two tokens of a decoding sequence, ``[num_workers]``, without calibration."""
        rates = [self._rates_of(name, int(count)) for name, count in zip(worker_ids, batches, strict=True)]
        tokens, drafted = np.array(rates).T
        return np.asarray(self._table(worker_ids).step_ms(batches, context_tokens, drafted) / tokens)

    def step_sds(self, worker_ids: Sequence[str]) -> Floats:
        """``[num_workers]``: standard deviation of a single step, relative to the prediction."""
        return self._table(worker_ids).sd

    def transfer_costs(self, prefill_ids: Sequence[str], decode_ids: Sequence[str]) -> tuple[Floats, Floats]:
        """Fixed milliseconds and milliseconds per byte of a hand-off, each ``[num_prefill, num_decode]``."""
        key = (tuple(prefill_ids), tuple(decode_ids))
        cached = self._link_tables.get(key)
        if cached is None:
            unknown = self._usual_link
            links = self._links
            rows = [
                cost.coefficients if (cost := links.get((prefill, decode))) is not None else unknown
                for prefill in prefill_ids
                for decode in decode_ids
            ]
            shape = (len(prefill_ids), len(decode_ids))
            fixed, per_byte = np.array(rows, dtype=float).reshape(-1, len(TRANSFER_PRIOR)).T
            cached = fixed.reshape(shape), per_byte.reshape(shape)
            _remember(self._link_tables, key, cached)
        return cached

    def _rates_of(self, worker_id: str, batch: int) -> tuple[float, float]:
        """Tokens and drafted tokens per sequence and step. A routing decision asks several times per worker."""
        key = worker_id, size_class(batch)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = self._workers[worker_id].rates(batch)
        return found

    def _new_link(self) -> CostFit:
        return CostFit(self._usual_link, MEASURED_WEIGHT)

    def _learn_link(self, link: Link, samples: Iterable[tuple[float, float]], now_s: float) -> None:
        """Learns from (bytes, milliseconds) of a link. Links without samples are expected to be like the others."""
        fit = self._links.get(link) or self._new_link()
        self._links[link] = fit
        for num_bytes, ms in samples:
            fit.add((1.0, num_bytes), ms, now_s)
        fit.refit(now_s)
        # Geometric, and the prior counts as one link, so that a single slow link does not put off trying another one.
        known = [own.coefficients for own in islice(reversed(self._links.values()), _MAX_LINKS_IN_MEAN)]
        fixed, per_byte = np.exp(np.log([TRANSFER_PRIOR, *known]).mean(axis=0)).tolist()
        self._usual_link = fixed, per_byte

    def _forget_tables(self) -> None:
        self._tables.clear()
        self._rates.clear()

    def _table(self, worker_ids: Sequence[str]) -> CostTable:
        key = tuple(worker_ids)
        table = self._tables.get(key)
        if table is None:
            workers = [self._workers[worker_id] for worker_id in key]
            table = CostTable(
                np.array([worker.costs for worker in workers]).T,
                np.array([worker.traits.chunk_tokens for worker in workers], float),
                np.array([worker.sd for worker in workers]),
            )
            _remember(self._tables, key, table)
        return table


def _remember(tables: dict[_Key, _Table], key: _Key, table: _Table) -> None:
    """Keeps a table. A few are enough, since pools change seldom and sampled candidates do not repeat."""
    if len(tables) >= _MAX_TABLES:
        tables.clear()
    tables[key] = table
