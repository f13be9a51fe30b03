"""How a model is computed: names that the configuration section ``engine`` shares with the model runner."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.kv_spec import KVEncoding

DECODERS = ("auto", "fused", "transformers")
FUSED_WEIGHTS = ("native", "int8", "int4")
"""Those that the fused decoder computes."""
WEIGHTS = (*FUSED_WEIGHTS, "fp8")
DECODER_OF_WEIGHTS = {"int8": "fused", "int4": "fused", "fp8": "transformers"}
"""The only decoder that computes them."""
CUDA_GRAPHS = ("auto", "off")
KV_CACHES = tuple(KVEncoding)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """
    Attributes:
        attention_backend: a name of ``attention/backends.py``, or ``auto``.
        decoder: what computes the model. ``transformers``: its own modules; ``fused``: one compiled program on the CPU,
            for models of the Llama family; ``auto``: ``fused`` where it can, else ``transformers``.
        weights: ``native``: as the model has them; ``int8``, ``int4``: see ``quantization``, only with ``fused``;
            ``fp8``: for a model that was loaded so, only with ``transformers``.
        cuda_graphs: ``auto``: record decode and verification steps on CUDA, where the model's own modules compute them
            with a backend that reads the block table; ``off``: record nothing.
        kv_cache: ``native``: keys and values as the model makes them; ``int8``: see ``kv_int8``.

    Raises:
        ConfigError: a name is unknown, or two do not go together.
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
