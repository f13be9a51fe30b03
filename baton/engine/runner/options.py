"""Options of the model runner: names that it shares with the configuration section ``engine``."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.kv_spec import KVEncoding

DECODERS = ("auto", "fused", "transformers")
FUSED_WEIGHTS = ("native", "int8", "int4")
"""Formats that the fused decoder computes."""
WEIGHTS = (*FUSED_WEIGHTS, "fp8", "dequantized")
DECODER_OF_WEIGHTS = {"int8": "fused", "int4": "fused", "fp8": "transformers"}
"""The only decoder that computes them."""
CUDA_GRAPHS = ("auto", "off")
KV_CACHES = tuple(KVEncoding)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How the model runner computes a model.

    Attributes:
        attention_backend: a name of ``attention/backends.py``, or ``auto``.
        decoder: ``transformers`` is the model's own modules; ``fused`` is one compiled program on the CPU, for models
            of the Llama family; ``auto`` is ``fused`` where it can, else ``transformers``.
        weights: ``native`` keeps the model's; ``dequantized`` does so too, for a model that was loaded so; ``int8`` and
            ``int4``, see ``quantization``, require ``fused``; ``fp8``, for a model loaded as fp8, requires
            ``transformers``.
        cuda_graphs: ``auto`` records decode and verification steps on CUDA, where the model's own modules compute them
            with a backend that reads the block table; ``off`` records nothing.
        kv_cache: ``native`` stores keys and values in the model's dtype; ``int8``, see ``kv_int8``.

    Raises:
        ConfigError: a name is unknown, or two options contradict each other.
    """

    attention_backend: str = "auto"
    decoder: str = "auto"
    weights: str = "native"
    cuda_graphs: str = "auto"
    kv_cache: str = KVEncoding.NATIVE

    def __post_init__(self) -> None:
        for name, known in (
            ("decoder", DECODERS),
            ("weights", WEIGHTS),
            ("cuda_graphs", CUDA_GRAPHS),
            ("kv_cache", KV_CACHES),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"engine.{name} is {value!r}, but it must be one of: {', '.join(known)}.")
        needed = DECODER_OF_WEIGHTS.get(self.weights, self.decoder)
        if self.decoder not in ("auto", needed):
            raise ConfigError(f"engine.weights is {self.weights}, which needs engine.decoder: {needed} or auto.")
