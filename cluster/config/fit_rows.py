"""What ``baton check`` says about each pool. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FitRow:
    """One pool. Sizes are bytes, of the rank with most.

    Attributes:
        num_ranks: processes among which a worker divides the model.
        gpus: GPUs of a worker; 0 on a CPU.
        gpu: their type; "GPU" if it is not stated, empty on a CPU.
        memory: of that GPU; 0 if unknown.
        num_parameters: of the whole model.
        weights: those of a rank.
        step: estimate of what the largest step and CUDA graphs take.
        kv_per_token: KV of one token on a rank; ``whole_kv_per_token`` is that of all heads.
        kv_tokens: tokens for which a worker has room; 0 on a CPU.
        problem: why it does not fit; empty if it does.
        remedies: settings, of which each alone makes it fit.
    """

    pool: str
    workers: int
    num_ranks: int
    gpus: float
    gpu: str
    num_parameters: int
    weights: int
    step: int
    kv_per_token: int
    whole_kv_per_token: int
    memory: int = 0
    kv_tokens: int = 0
    problem: str = ""
    remedies: list[str] = field(default_factory=list)

    @property
    def hardware(self) -> str:
        """What a worker runs on: ``2 x H100``."""
        if self.gpus:
            return f"{self.gpus:g} x {self.gpu}"
        return "CPU" if self.num_ranks == 1 else f"CPU, {self.num_ranks} ranks"

    def explain(self) -> str:
        """The problem and what to do about it, in sentences."""
        remedies = f" One of these helps: {'; '.join(self.remedies)}." if self.remedies else ""
        return f"{self.pool}: {self.problem}.{remedies}"
