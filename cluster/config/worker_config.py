"""The sections of the configuration for workers: pools, engine and speculation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.core.config_section import DraftReference, Niceness, NonEmptyString, PositiveInt, Section
from baton.core.ranks import MAX_RANKS
from baton.core.roles import SpeculationMethod
from baton.core.rounds import MAX_NODES

ChainMethod = Literal["draft_model", "eagle", "eagle3", "ngram", "suffix"]
"""Speculation methods that draft chains, whose length is limited by method."""
AcceptanceRule = Literal["match", "residual", "typical"]


class ResourcesConfig(Section):
    """The resources that each worker of a pool requests from Ray."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Share of a node's CPUs for placing the worker; it does not limit its threads."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of a worker. With several, a whole number, the model is divided among them (tensor parallelism); with a
    fraction, the worker shares a GPU with other workers."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Main memory to reserve; null: Ray reserves none."""
    accelerator_type: NonEmptyString | None = None
    """Value of the node label ``ray.io/accelerator-type``, such as H100."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further node labels that must match (Ray's label selector syntax)."""


class PoolConfig(Section):
    """A pool of workers and the limits of their schedulers."""

    workers: PositiveInt = 1
    """Number of workers at the start; `baton scale` changes it."""
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """Processes among which a worker divides the model; the pools may differ. null: one per GPU, or one on a CPU."""
    chunk_tokens: PositiveInt = 512
    """Token budget of one engine step; longer prompts are prefilled in chunks."""
    max_num_seqs: PositiveInt = 64
    """Maximum number of sequences in one engine step."""
    kv_blocks: Annotated[int, Field(ge=2)] | None = None
    """Size of each worker's KV cache in blocks; set only this or ``kv_memory_gib``."""
    kv_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of each worker's KV cache in GiB. Without either setting: 1 GiB on a CPU; on a GPU, what
    ``engine.gpu_memory_utilization`` leaves."""
    resources: ResourcesConfig = ResourcesConfig()

    @model_validator(mode="after")
    def _one_kv_size(self) -> PoolConfig:
        if self.kv_blocks is not None and self.kv_memory_gib is not None:
            raise ValueError("kv_blocks and kv_memory_gib both set the size of the KV cache; set only one of them")
        return self

    @model_validator(mode="after")
    def _a_gpu_for_each_rank(self) -> PoolConfig:
        gpus, degree = self.resources.gpus, self.tensor_parallel
        if gpus > 1 and (gpus != int(gpus) or gpus > MAX_RANKS):
            raise ValueError(
                f"resources.gpus is {gpus:g}; give a fraction of one GPU, or a whole number of at most {MAX_RANKS}"
            )
        if degree is not None and gpus and degree != max(1, gpus):
            raise ValueError(
                f"tensor_parallel is {degree}, but resources.gpus is {gpus:g}; each process needs a GPU of its own, so"
                f" set resources.gpus to {degree}, or leave tensor_parallel out"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes among which a worker divides the model."""
        return self.tensor_parallel or max(1, int(self.resources.gpus))


class PrefillConfig(PoolConfig):
    """The prefill pool."""

    ordering: Literal["edf", "fcfs"] = "edf"
    """Which prompt is prefilled next: the earliest deadline of the highest priority, or first come, first served."""
    niceness: Niceness = "auto"
    """Niceness, as in nice(1), of prefill on CPUs, so that it yields to decode workers on the same cores. auto: 10
    where the fused decoder uses a matrix unit, else 0, since prompts need most of the time there."""


class SpeculationConfig(Section):
    """Speculative decoding: drafts tokens and verifies several of them in one step.

    The output consists of the target's own samples. In float32 they are those of plain decoding; in half precision a
    forward pass of several tokens rounds differently from that of a single token, so nearly equal tokens can swap.
    """

    method: SpeculationMethod = "auto"
    """auto: the method that promises most tokens per millisecond, if any; none; or the name of a method."""
    draft: DraftReference = "auto"
    """A draft checkpoint (EAGLE or Medusa heads, or a smaller model of the same vocabulary): a folder or a hub id.
    eagle3, medusa, draft_model: those that come with the default model. auto: for the default model, the one that
    ``method`` or ``shadow`` needs, or eagle3; none for others. none: no draft."""
    draft_on_prefill: bool = True
    """Prefill workers run the draft over the prompt, and its KV is sent with the model's."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_NODES)] = 8
    """Maximum number of drafted tokens in a chain, per request and step."""
    draft_tokens: dict[ChainMethod, Annotated[int, Field(ge=1, le=32)]] = Field(default_factory=dict)
    """The same for single methods, instead of ``max_draft_tokens``. Long repetitions are worth more tokens of ``ngram``
    and ``suffix``, which cost next to nothing to draft."""
    max_tree_tokens: Annotated[int, Field(ge=1, le=MAX_NODES)] = 16
    """Maximum number of drafted tokens in a tree, per request and step."""
    tree_max_batch: Annotated[int, Field(ge=0, le=64)] = 1
    """EAGLE heads draft trees in steps with at most this many sequences, and chains in larger ones; 0: always
    chains."""
    lookahead_window: Annotated[int, Field(ge=0, le=16)] = 5
    """Columns of the window of ``lookahead``, as far as ``max_tree_tokens`` has room; 0 verifies n-grams of the text
    only."""
    shadow: Literal["draft_model", "eagle", "eagle3", "medusa", "ngram", "suffix"] | None = None
    """A method whose drafts are only compared with the tokens of requests that do not speculate, to learn how often
    they would be accepted. Needs method: none."""
    shadow_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the steps in which ``shadow`` drafts."""
    acceptance: AcceptanceRule = "match"
    """match: the model samples its own token at every position, and drafts are kept while they equal it; seeds give the
    same tokens as without speculation. residual: drafts are sampled too, and accepted or corrected so that the
    distribution is the model's (Leviathan et al.). typical: LOSSY; plausible drafts are kept (Medusa)."""
    typical_epsilon: Annotated[float, Field(gt=0, le=1)] = 0.09
    typical_alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Factor of exp(-entropy) in the threshold of typical acceptance."""
    remember_outputs: bool = False
    """Let ``suffix`` also draft from the outputs of earlier requests. A client that sees how many drafts were accepted
    could infer the answers to others, so leave it off where clients must be isolated from each other."""

    @model_validator(mode="after")
    def _shadows_plain_decoding(self) -> SpeculationConfig:
        if self.shadow is not None and self.method != "none":
            raise ValueError(
                f"shadow: {self.shadow} is compared with the tokens of plain decoding, but method is {self.method}; "
                "set method: none, or leave shadow out"
            )
        return self

    @property
    def wanted_draft(self) -> SpeculationMethod | None:
        """The method that ``draft: auto`` chooses a draft for; ``None`` if no method is configured."""
        return self.shadow if self.method == "none" else self.method

    def chain_tokens(self, method: ChainMethod) -> int:
        """Maximum number of drafted tokens in a chain of a method."""
        return self.draft_tokens.get(method, self.max_draft_tokens)

    @property
    def largest_draft(self) -> int:
        """Maximum number of drafted tokens per request and step, over all methods."""
        return max(self.max_draft_tokens, self.max_tree_tokens, *self.draft_tokens.values())


class DecodeConfig(PoolConfig):
    """The decode pool."""


class EngineConfig(Section):
    """Settings of the engines of all workers."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    prefix_caching: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where Ray grants a GPU, else the CPU."""
    threads: PositiveInt | None = None
    """CPU threads of torch; null: one per core, since a request never needs both pools at once; on CUDA 1."""
    decoder: Literal["auto", "fused", "transformers"] = "auto"
    """The implementation of the model. fused: one compiled program, on the CPU, for models of the Llama family;
    transformers: the model's own modules; auto: fused where possible."""
    weights: Literal["native", "dequantized", "int8", "int4", "fp8"] = "native"
    """Format to which the model's linear layers are converted when a worker starts. native: as the checkpoint stores
    them; dequantized: those of a quantized checkpoint (FP8, AWQ, GPTQ and others) in ``dtype``; int8: half the bytes to
    read per token, with a small loss of quality; int4: a third, with a loss that depends on the model; int8 and int4
    need the fused decoder. fp8: half, on GPUs since Ada and Hopper, with bfloat16; it needs the model's own modules."""
    kv_cache: Literal["native", "int8"] = "native"
    """Format of keys and values. native: as the model computes them; int8: LOSSY, half the bytes of bfloat16 in the
    cache and in hand-offs; the KV of drafts stays native."""
    attention_backend: Literal["auto", "torch_sdpa", "triton_paged"] = "auto"
    """Attention of the model's own modules and of drafts. torch_sdpa: works everywhere; triton_paged: on CUDA; auto:
    triton_paged where possible."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that the workers on it use together: weights, the largest step, CUDA graphs, and KV in
    the rest. Each worker takes ``resources.gpus`` of that."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: decode workers on CUDA capture their steps at start, if attention is triton_paged; off: no graphs."""
    overlap_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the tokens of the previous one are known, unless a speculation method or a draft that
    follows the model needs these tokens. auto: on CUDA; off: never."""
    self_check: bool = True
    """Compare the engine with the model's own forward pass when a worker starts."""

    @model_validator(mode="after")
    def _weights_that_the_decoder_knows(self) -> EngineConfig:
        needed = {"fp8": "transformers", "int8": "fused", "int4": "fused"}.get(self.weights, self.decoder)
        if self.decoder not in ("auto", needed):
            raise ValueError(f"weights: {self.weights} needs decoder: {needed} or auto")
        return self
