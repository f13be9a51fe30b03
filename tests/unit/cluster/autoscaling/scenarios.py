"""Pools whose costs are known in closed form, and observations of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.core.roles import DECODE, POOLS, PREFILL
from baton.core.slo import INTERACTIVE, SloClass
from cluster.autoscaling.autoscaler import AutoscalerState, ScalingPlan, plan
from cluster.autoscaling.autoscaler_config import AutoscalerConfig
from cluster.autoscaling.demand import ClassDemand, Demand, PromptGroup
from cluster.autoscaling.observation import Observation, PoolCounts, PoolObservation
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits

LIMITS = replace(
    AutoscalerConfig().to_limits(is_local=True),
    pools={PREFILL: PoolLimits(1, 64), DECODE: PoolLimits(1, 64)},
    calm_s=60.0,
)


@dataclass(frozen=True)
class FormulaCosts:
    """The milliseconds of a fictitious accelerator, in the model's own form. Implements PoolCosts."""

    fixed: float = 8.0
    per_prompt_token: float = 0.1
    per_pair: float = 1e-6
    per_sequence: float = 0.4
    per_context_token: float = 2e-5
    rounds: float = 1.0
    chunk_tokens: int = 4096
    max_num_seqs: int = 256
    kv_tokens: int = 1_000_000
    is_measured: bool = True

    def prefill_ms(self, uncached_tokens: float, cached_tokens: float) -> float:
        steps = -(-uncached_tokens // self.chunk_tokens)
        pairs = uncached_tokens * (cached_tokens + uncached_tokens / 2)
        return steps * self.fixed + self.per_prompt_token * uncached_tokens + self.per_pair * pairs

    def step_ms(self, batch: int, context_tokens: float, drafted_tokens: float = 0.0) -> float:
        return self.fixed + batch * (self.per_sequence * (1 + drafted_tokens) + self.per_context_token * context_tokens)

    def tpot_ms(self, batch: int, context_tokens: float) -> float:
        return self.step_ms(batch, context_tokens, self.rounds - 1) / self.rounds

    def plain_tpot_ms(self, batch: int, context_tokens: float) -> float:
        return self.step_ms(batch, context_tokens)

    def tokens_per_round(self, batch: int) -> float:
        return self.rounds

    def handoff_ms(self, tokens: float) -> float:
        return 2.0 + 0.001 * tokens


COSTS = FormulaCosts()


def demand(
    rate: float, prompt: float = 1000, output: float = 200, slo: SloClass = INTERACTIVE, seen: int = 1000
) -> Demand:
    return Demand((ClassDemand(slo, rate, (PromptGroup(1.0, prompt),), output),) if rate else (), seen)


def observe(
    now_s: float,
    asked: Demand,
    prefill: int | PoolCounts = 1,
    decode: int | PoolCounts = 1,
    costs: FormulaCosts | None = COSTS,
    waiting: float = 0.0,
    decoding: float = 0.0,
    growth: float = 0.0,
    role_change_obstacle: str = "not here",
) -> Observation:
    """An observation; workers given as a number are all ready."""
    counts = {
        name: PoolCounts(given, given) if isinstance(given, int) else given
        for name, given in ((PREFILL, prefill), (DECODE, decode))
    }
    loads = {PREFILL: waiting, DECODE: decoding}
    pools = {name: PoolObservation(counts[name], costs, loads[name], growth) for name in POOLS}
    return Observation(now_s, asked, pools, role_change_obstacle=role_change_obstacle)


def decide(
    observation: Observation, bounds: ScalingLimits = LIMITS, state: AutoscalerState | None = None
) -> ScalingPlan:
    """The plan for an observation, by default the first one."""
    return plan(observation, bounds, state or AutoscalerState())


class Planned:
    """Plans repeatedly, with pools that reach their targets at once."""

    def __init__(self, limits: ScalingLimits = LIMITS, prefill: int = 1, decode: int = 1) -> None:
        self.limits = limits
        self.sizes = {PREFILL: prefill, DECODE: decode}
        self.state = AutoscalerState()
        self.now_s = 0.0
        self.changes: list[tuple[float, str, int]] = []

    def step(self, asked: Demand, **seen: object) -> ScalingPlan:
        observation = observe(self.now_s, asked, self.sizes[PREFILL], self.sizes[DECODE], **seen)
        decided = plan(observation, self.limits, self.state)
        self.state = decided.state
        for name, pool in decided.pools.items():
            if pool.target != self.sizes[name]:
                self.changes.append((self.now_s, name, pool.target))
                self.sizes[name] = pool.target
        self.now_s += self.limits.interval_s
        return decided

    def run(self, seconds: float, asked: Demand) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.step(asked)


def limits(**changes: object) -> ScalingLimits:
    return replace(LIMITS, **changes)
