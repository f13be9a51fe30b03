"""The sections of the configuration that say what workers are: pools, engine and speculation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.core.config_section import DraftReference, Niceness, NonEmptyString, PositiveInt, Section
from baton.core.roles import SpeculationMethod

AcceptanceRule = Literal["match", "residual", "typical"]


class ResourcesConfig(Section):
    """What one worker of a pool asks Ray for."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A worker runs on one GPU at most; a fraction shares it with other workers."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Main memory to reserve; Ray does not reserve any when null."""
    accelerator_type: NonEmptyString | None = None
    """Value of the node label ``ray.io/accelerator-type``, such as H100."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further node labels that must match (Ray's label selector syntax)."""


class PoolConfig(Section):
    """One pool of workers and how each of them schedules."""

    workers: PositiveInt = 1
    chunk_tokens: PositiveInt = 512
    """Token budget of one engine step; longer prompts are prefilled in chunks."""
    max_num_seqs: PositiveInt = 64
    """Sequences in one engine step."""
    kv_blocks: Annotated[int, Field(ge=2)] | None = None
    """Size of each worker's KV cache in blocks; it or ``kv_memory_gib`` may be set."""
    kv_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """The same in GiB. Neither set: 1 GiB on a CPU; on a GPU, what ``engine.gpu_memory_utilization`` leaves."""
    resources: ResourcesConfig = ResourcesConfig()

    @model_validator(mode="after")
    def _one_kv_size(self) -> PoolConfig:
        if self.kv_blocks is not None and self.kv_memory_gib is not None:
            raise ValueError("kv_blocks and kv_memory_gib both size the KV cache; set only one of them")
        return self


class PrefillConfig(PoolConfig):
    """The prefill pool."""

    ordering: Literal["edf", "fcfs"] = "edf"
    """Which prompt is prefilled next: the earliest deadline of the highest priority, or first come, first served."""
    niceness: Niceness = "auto"
    """By how much prompts on CPUs yield to whoever decodes on the same cores, as in nice(1); 0: not at all. auto: 10
    where the fused decoder computes them by a matrix unit, else 0, since they need most of the time there."""


class SpeculationConfig(Section):
    """Speculative decoding: guesses tokens and verifies several of them in one step.

    The target's own draws are what comes out. In float32 they are those of plain decoding; in half precision a forward
    of several tokens rounds otherwise than one of a single token, so nearly equal tokens can change places.
    """

    method: SpeculationMethod = "auto"
    """auto: whatever promises most tokens per millisecond, or nothing; none; or the name of a method."""
    draft: DraftReference = "auto"
    """A draft checkpoint (EAGLE or Medusa heads, or a smaller model of the same vocabulary): a folder or a hub id.
    auto: the one that comes with the default model, for other models none. none: no such draft."""
    draft_on_prefill: bool = True
    """Prefill workers run the draft over the prompt, and its KV travels with the model's."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 8
    """Of a chain, per request and step."""
    max_tree_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """The same for methods that draft trees."""
    tree_max_batch: Annotated[int, Field(ge=0, le=64)] = 1
    """EAGLE heads draft trees while a step has no more sequences than that, and chains beyond; 0: always chains."""
    acceptance: AcceptanceRule = "match"
    """match: the model draws its own token at every place, and drafts are kept as long as they equal it; seeds give the
    same tokens as without speculation. residual: drafts are drawn too, and accepted or corrected so that the
    distribution is the model's (Leviathan et al.). typical: LOSSY; plausible drafts are kept (Medusa)."""
    typical_epsilon: Annotated[float, Field(gt=0, le=1)] = 0.09
    typical_alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    remember_outputs: bool = False
    """Let ``suffix`` draft from the outputs of earlier requests too. Who can see how many drafts were right could tell
    what others were answered, so leave it off where clients must not know of each other."""


class DecodeConfig(PoolConfig):
    """The decode pool."""


class EngineConfig(Section):
    """What every worker's engine shares."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    prefix_caching: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where Ray grants a GPU, else the CPU."""
    threads: PositiveInt | None = None
    """Threads of torch on the CPU; null: every core, since one request never needs both pools at once; on CUDA 1."""
    decoder: Literal["auto", "fused", "transformers"] = "auto"
    """What computes the model. fused: one compiled program, on the CPU, for models of the Llama family; transformers:
    the model's own modules; auto: fused where it can."""
    weights: Literal["native", "int8", "int4", "fp8"] = "native"
    """What the model's linear layers are made into when a worker starts. native: what the model has; int8: half of what
    there is to read for a token, with a small loss of quality; int4: a third, with a loss that depends on the model;
    only the fused decoder computes these. fp8: half, for GPUs since Ada and Hopper, beside bfloat16; only the model's
    own modules compute it."""
    kv_cache: Literal["native", "int8"] = "native"
    """What keys and values are kept as. native: as the model makes them; int8: LOSSY, half of the bytes of bfloat16 in
    the cache and on their way between the pools; those of drafts stay native."""
    attention_backend: NonEmptyString = "auto"
    """Of the model's own modules, and of drafts. torch_sdpa: everywhere; triton_paged: on CUDA; auto: the latter where
    it can."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Part of a GPU that the workers on it use together: weights, the largest step, CUDA graphs, and KV in the rest. A
    worker takes ``resources.gpus`` of that."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: decode workers on CUDA record their steps when they start, where attention is triton_paged; off: not."""
    overlap_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the tokens of the one before it are known, where nobody drafts from them: neither a
    speculation method nor a draft that follows the model. auto: on CUDA; off: never."""
    self_check: bool = True
    """Compare the engine with the model's own forward pass when a worker starts."""

    @model_validator(mode="after")
    def _weights_that_the_decoder_knows(self) -> EngineConfig:
        needed = "transformers" if self.weights == "fp8" else "fused"
        if self.weights != "native" and self.decoder not in ("auto", needed):
            raise ValueError(f"weights: {self.weights} needs decoder: {needed} or auto")
        return self
